// SPDX-License-Identifier: Apache-2.0
//
// A permutation of [0, n) without memory: a Feistel network on the smallest power of 4 that is at least n, whose round
// function is the counter-based generator. A number that is not below n is permuted again until one is (Black and
// Rogaway, "Ciphers with arbitrary finite domains", 2002): fewer than 4 times on average.
#pragma once

#include <cstdint>

namespace weft::dataset {

/// Element `i` of the permutation of [0, n) of this seed and epoch; 0 <= i < n, epoch < 2^56.
std::int64_t shuffled_segment(std::int64_t i, std::int64_t n, std::uint64_t seed, std::int64_t epoch);

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
//
// Which records a private step takes: Poisson sampling. Each record joins with probability `rate`, independently of all
// others and of earlier steps: what the accountants assume. A batch has no fixed size and may be empty.
//
// The draw follows from (key, step) alone, so all ranks know it without communication, and a resumed run repeats it.
// The key is the secret of the noise (kernels/privacy/noise.hpp): an observer who knew the batches would lose nothing
// to sampling, and the guarantee counts on it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/privacy/noise.hpp"

namespace weft::privacy {

/// Poisson sample of the numbers below `records`, ascending. `rate` in (0, 1]. Takes time and memory proportional to
/// rate * records.
std::vector<std::int64_t> poisson_sample(const kernels::NoiseKey&, std::uint64_t step, std::int64_t records,
                                         double rate);

/// Keeps `most` of the records of a step, each subset of so many with the same probability, in their order; all if
/// there are no more. `most` > 0.
void truncate_sample(const kernels::NoiseKey&, std::uint64_t step, std::int64_t most,
                     std::vector<std::int64_t>& records);

}  // namespace weft::privacy

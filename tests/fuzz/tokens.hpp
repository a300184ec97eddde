// SPDX-License-Identifier: Apache-2.0
//
// Common to the targets for token files.
#pragma once

#include <algorithm>
#include <vector>

#include "dataset/tokens/batches.hpp"
#include "tests/fuzz/target.hpp"

namespace weft::fuzz {

/// Opens a token file and, if it is accepted, reads it as windows and whole, and digests it.
inline void read_tokens(const std::string& path) {
  accepts({ExitCode::data}, [&] {
    const dataset::TokenSet set = dataset::TokenSet::open(path);
    set.fingerprint();
    const dataset::Segments segments(set);
    dataset::TokenRows rows(2, 5, true);
    for (std::int64_t first = 0; first < std::min<std::int64_t>(segments.count(5), 20); first += 2)
      segments.fill(first, rows.batch());
    set.check();
  });
}

}  // namespace weft::fuzz

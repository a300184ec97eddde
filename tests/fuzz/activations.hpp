// SPDX-License-Identifier: Apache-2.0
//
// Common to both targets for activation files.
#pragma once

#include <algorithm>
#include <vector>

#include "dataset/activations/describe.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "tests/fuzz/target.hpp"

namespace weft::fuzz {

/// Describes the dataset and, if it is accepted, reads its token ids and its first and last rows. True if all were
/// read.
inline bool read_dataset(const std::string& directory) {
  dataset::Settings settings;
  settings.stored_as = "bf16";
  return accepts({ExitCode::data}, [&] {
    const dataset::Description description = dataset::describe(directory, settings);
    dataset::Reader reader(description, 1);
    const std::int64_t rows = std::min<std::int64_t>(description.n_rows, 64);
    std::vector<std::byte> inputs(static_cast<std::size_t>(rows * description.row_bytes())), targets(inputs.size());
    if (description.has_tokens) dataset::check_tokens(description);
    for (const std::int64_t begin : {std::int64_t{0}, description.n_rows - rows})
      reader.read(std::vector<dataset::RowRead>{{0, begin, rows, inputs.data(), targets.data()}});
  });
}

}  // namespace weft::fuzz

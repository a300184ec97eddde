// SPDX-License-Identifier: Apache-2.0
//
// Describes a directory of activation files (description.hpp) from their headers and a small sample of their values.
// Files are opened read-only.
#pragma once

#include <string>
#include <string_view>

#include "dataset/activations/description.hpp"
#include "dataset/dataset_settings.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

/// Replaces ${NAME} and $NAME. Throws a collective Error(usage) for a variable that is not set.
std::string expand_environment(std::string_view text);

/// Reads the headers and a sample of every file. Throws Error(data) with file and dataset for missing, truncated,
/// inconsistent or non-finite data, for a shape other than settings.layers and settings.d_model, and for 16-bit data
/// without negative values (a known defect of some writers). At most about 2 GiB of compressed data are unpacked for
/// the sample.
Description describe(const std::string& path, const Settings&);
/// Rank 0 reads and broadcasts the description; the other ranks compare files with it (row_sample.hpp). Collective;
/// errors are known to all ranks.
Description describe(const parallel::World&, const std::string& path, const Settings&);

/// A dataset that does not exist yet, for planning: settings.layers and settings.d_model, bf16, one file of
/// window_rows rows; n_rows = 0 (unknown).
Description imagined(const std::string& path, const Settings&);

/// Model and hook points as the root attributes of the first file state them; "" = not stated.
struct HookPoints {
  std::string model, inputs, targets;
};
/// Throws like `describe` if there is no file or it cannot be opened.
HookPoints hook_points(const std::string& directory);

}  // namespace weft::dataset

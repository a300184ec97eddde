// SPDX-License-Identifier: Apache-2.0
//
// The sidecar files of a dataset, checked against its chunk files. Their contents are not trusted: sizes come from the
// file system, and counts are compared before they are used.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "dataset/activations/description.hpp"

namespace weft::dataset {

/// Text of at most `at_most` bytes. Throws Error(data) if it is longer or no regular file, Error(io) if reading fails.
std::string read_small_file(const std::string& path, std::int64_t at_most);

/// Checks metadata.json: num_layers, d_model, dtype, total_tokens and model_name must agree with the files, if present.
/// Copies the model name into the description. A missing file is an error in Weft's own layout, otherwise a note.
void check_metadata(Description&);
/// Checks the text of a metadata.json like `check_metadata`. Throws Error(data) with a message that begins with `path`.
void check_metadata_text(const std::string& path, std::string_view text, Description&);

/// Checks index.bin: entries {int32 file, int32 rows, int64 first row} for each file, or the older {uint32 file, uint32
/// row} for each row; little-endian. Either must list every row of every file exactly once.
void check_index(Description&);
void check_index_bytes(const std::string& path, std::span<const std::byte> bytes, const Description&);

}  // namespace weft::dataset

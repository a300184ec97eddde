// SPDX-License-Identifier: Apache-2.0
//
// One token file in HDF5 (docs/file_formats.md): the ids of a text, where its documents start, and the tokeniser. The
// ids are contiguous and uncompressed, so that they can be mapped into memory at the offset that the header gives.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "kernels/array.hpp"
#include "storage/stored_array.hpp"

namespace weft::storage {

/// Bytes of a tokeniser's text: those of vocabularies of some 100,000 tokens have a few MiB.
inline constexpr std::int64_t kLargestTokenizer = std::int64_t{64} << 20;

struct TokenHeader {
  StoredArray tokens;           ///< u16 or u32, at least one
  StoredArray documents;        ///< i64, at least one
  StoredArray counted;          ///< u8, as many as tokens, or none
  std::int64_t vocabulary = 0;  ///< 1 to 2^31 - 1
  std::int64_t text_bytes = 0;  ///< 0 = unknown
  std::string tokenizer;        ///< "" = none
};

/// Reads the header; does not read ids or documents. Throws Error(data) with file and dataset for everything that is
/// not such a file; all sizes are checked against that of the file.
TokenHeader read_token_header(const std::filesystem::path& path);

/// Writes a new file. The ids must be below `vocabulary`; they are stored with 16 bits if that suffices. Throws
/// Error(io), also if the file exists. counted: of each id 1 or 0; empty: the file says nothing, and all count.
void write_token_file(const std::filesystem::path& path, std::span<const std::uint32_t> ids,
                      std::span<const std::int64_t> documents, std::int64_t vocabulary, std::int64_t text_bytes,
                      std::string_view tokenizer, std::span<const std::uint8_t> counted = {});

}  // namespace weft::storage

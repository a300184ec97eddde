// SPDX-License-Identifier: Apache-2.0
//
// One activation file: in HDF5 with groups layer_{l} of datasets inputs and targets, [rows, columns]; in Weft's own
// format also the token id of each row and the rows at which documents begin. Two layouts of other programs have all
// layers of a row in one place, uncompressed:
//
//   CLT-Forge              NAME.safetensors: act_in, act_out [rows, layers, columns]; tokens [rows], int64
//   crosslayer-transcoder  HDF5: tensor [rows, 2, layers, columns], contiguous; inputs before targets
//
// All sizes in headers are checked against the size of the file, so that callers may allocate memory by them. Memory
// type and file type of rows are equal: HDF5 converts nothing. Errors name file and dataset.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/array.hpp"
#include "storage/hdf5.hpp"
#include "storage/posix_file.hpp"
#include "storage/stored_array.hpp"

namespace weft::storage {

/// Root attribute "format" of Weft's own files, and the "format_version" from which on they have token ids.
inline constexpr const char* kActivationFormat = "weft-activations";
inline constexpr std::int64_t kActivationFormatWithTokens = 2;

enum class Side { inputs, targets };
/// Names of the layouts of other programs: ActivationHeader::format of their files.
inline constexpr const char* kCltForge = "clt-forge";
inline constexpr const char* kCrosslayerTranscoder = "crosslayer-transcoder";

/// "/layer_3/inputs"; in a layout of another program "act_in, layer 3" or "/tensor, inputs of layer 3".
std::string dataset_name(Side side, std::int64_t layer, std::string_view layout = "");

/// Header of one dataset.
struct MatrixHeader {
  kernels::Scalar type = kernels::Scalar::fp32;  ///< fp32, fp16, bf16 or u16
  std::string declared;                          ///< attribute "dtype"; "" = none
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t chunk_rows = 0;  ///< 0 = contiguous
  std::int64_t chunk_columns = 0;
  bool filtered = false;  ///< chunks pass through a filter, such as gzip
  bool direct = false;    ///< uncompressed: `extents` can locate its rows
};

/// Rows of one side with all layers, [layers, columns] each: row r begins at byte offset + r * pitch.
struct WholeRows {
  std::int64_t offset = 0, pitch = 0;
};

struct ActivationHeader {
  std::string format;  ///< root attribute "format", or the layout of another program; "" = none
  std::int64_t format_version = 0;
  std::string model, hook_inputs, hook_targets;  ///< root attributes; "" = none
  std::vector<MatrixHeader> inputs, targets;     ///< [layer]
  /// Layouts of other programs: where the rows of the inputs and of the targets are.
  std::optional<std::array<WholeRows, 2>> whole_rows;
  std::int64_t context_rows = 0;  ///< CLT-Forge: each text has this many rows (from the directory's name); 0 = unknown
  /// Weft's own format: /tokens, int32, one per row; version 1 may have it, later versions have it. CLT-Forge: int64.
  std::optional<StoredArray> tokens;
  /// From version 2 on: /documents, int64, the first row of each document of this file; at most one per row.
  std::optional<StoredArray> documents;

  std::int64_t n_layers() const { return static_cast<std::int64_t>(inputs.size()); }
  const MatrixHeader& matrix(Side side, std::int64_t layer) const {
    return (side == Side::inputs ? inputs : targets)[static_cast<std::size_t>(layer)];
  }
};

/// Rows that are contiguous in the file.
struct Extent {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t offset = 0;  ///< byte in the file
  std::int64_t pitch = 0;   ///< bytes from a row to the next; 0: they follow one another
};

/// A range of bytes of the file.
struct StoredBytes {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// True for an HDF5 file of crosslayer-transcoder: such files have any name, so the contents distinguish them from
/// other HDF5 files.
bool is_crosslayer_transcoder_file(const std::filesystem::path& path);

/// An activation file, open read-only.
class ActivationFile {
 public:
  /// Reads all headers. Throws Error(io) if the file cannot be opened, Error(data) if it is not a valid activation
  /// file or no regular file.
  explicit ActivationFile(const std::filesystem::path& path);

  const ActivationHeader& header() const { return header_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t modified() const { return modified_; }  ///< nanoseconds since 1970

  const char* layout() const { return header_.whole_rows ? header_.format.c_str() : ""; }

  /// Location of all rows of a `direct` dataset, ascending.
  std::vector<Extent> extents(Side side, std::int64_t layer);
  /// First and last stored bytes of a dataset (of the first and last chunk if it is chunked), at most `at_most` each.
  /// Empty if the file has a user block or the data are inside the header.
  std::vector<StoredBytes> ends(Side side, std::int64_t layer, std::int64_t at_most);
  /// Location of one row, or of the chunk that holds it if the dataset is compressed. Empty for layouts in which the
  /// row would have to be searched for: use `read` for them.
  std::optional<StoredBytes> stored_row(Side side, std::int64_t layer, std::int64_t row);

  /// Reads rows [row_begin, row_begin + rows) through HDF5 to out + i * stride bytes (a multiple of the element size).
  /// Each chunk is unpacked once if a dataset is read in ascending order.
  void read(Side side, std::int64_t layer, std::int64_t row_begin, std::int64_t rows, std::byte* out,
            std::int64_t stride);

 private:
  // Callers hold the lock and convert Error(io) to Error(data).
  void read_headers();
  void read_clt_forge();
  void read_crosslayer_transcoder();
  void set_whole_rows(const char* layout, kernels::Scalar type, std::int64_t rows, std::int64_t layers,
                      std::int64_t columns, const std::array<WholeRows, 2>& places);
  /// The first byte of a row of one layer in `whole_rows`.
  std::int64_t place_of(Side side, std::int64_t layer, std::int64_t row) const;
  void read_token_headers();
  hid_t open(Side side, std::int64_t layer);
  MatrixHeader read_matrix_header(Side side, std::int64_t layer);
  std::vector<Extent> locate(Side side, std::int64_t layer);
  std::vector<StoredBytes> locate_ends(Side side, std::int64_t layer, std::int64_t at_most);
  std::optional<StoredBytes> locate_row(Side side, std::int64_t layer, std::int64_t row);
  void read_locked(Side side, std::int64_t layer, std::int64_t row_begin, std::int64_t rows, std::byte* out,
                   std::int64_t stride);

  std::string path_;
  std::int64_t bytes_ = 0, modified_ = 0;
  bool user_block_ = false;
  Handle file_;
  std::optional<PosixFile> rows_file_;  // file of `whole_rows`
  ActivationHeader header_;
  // The most recently used dataset stays open to keep its chunk cache.
  Handle dataset_, dataset_type_;
  std::string open_name_;
};

}  // namespace weft::storage

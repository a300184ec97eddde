// SPDX-License-Identifier: Apache-2.0
//
// Where the parts of a transcoder (rows.hpp) lie in the safetensors files of a format. A layout is a table: files with
// their tensors, and for each part the blocks of it that are strided rectangles inside those tensors. It is used in
// both directions: `LayoutRows` reads any layout, `write` writes it. A format is therefore a function that makes
// a layout.
//
// An element of a part is the sum of the blocks that contain it, and zero if none does. (Only decoder biases overlap:
// some formats store one per pair of layers, and they add up.) Scales that no block contains are one.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "interchange/rows.hpp"
#include "storage/safetensors.hpp"

namespace weft::interchange {

using storage::SafetensorsEntry;
using storage::SafetensorsFile;
using storage::SafetensorsWriter;

/// A rectangle of a part. Its element (row, column) is element
///   offset + (row - rows.begin) * row_stride + (column - columns.begin) * column_stride
/// of the tensor. One of the strides is 1.
struct Block {
  parallel::Range rows, columns;
  std::size_t file = 0, tensor = 0;  ///< Layout::files[file].tensors[tensor]
  std::int64_t offset = 0, row_stride = 0, column_stride = 1;
};

struct LayoutTensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

struct LayoutFile {
  std::string name;  ///< inside the directory
  std::vector<LayoutTensor> tensors;
  std::vector<std::string> ignored;  ///< tensors that may be present and do not affect the result
};

struct Layout {
  Contents contents;
  bool log_thresholds = false;    ///< the files hold ln theta
  bool positive_entries = false;  ///< JumpReLU also requires z > 0: a theta below 0 is read as 0
  bool summed_biases = false;     ///< the bias of target t is the sum of the files' decoder biases 0..t
  bool centred = false;           ///< the encoder reads x - decoder_bias: the files hold b_enc + W_enc decoder_bias
  /// Pre-activations are multiplied by the norm of the feature's decoder row, and that row is divided by it. Read only;
  /// requires Contents::per_layer.
  bool unit_decoder = false;
  std::vector<LayoutFile> files = {};
  std::map<std::pair<Part, std::int64_t>, std::vector<Block>> blocks = {};

  /// Adds a file and returns its index.
  std::size_t add_file(std::string name);
  /// Adds a tensor to a file and returns its index there.
  std::size_t add_tensor(std::size_t file, std::string name, std::vector<std::int64_t> shape);
  /// Adds a tensor that is the whole of a part: row-major, or its transpose.
  void add_whole(std::size_t file, std::string name, std::vector<std::int64_t> shape, Part part, std::int64_t layer,
                 bool transposed = false);
  /// Returns the columns of target layer `target` in the decoder of `source`.
  parallel::Range strip(std::int64_t source, std::int64_t target) const;
};

/// Reads the files of a layout in a directory.
class LayoutRows : public RowSource {
 public:
  /// Opens the files. Throws Error(data) if one is missing, or a tensor is missing or has another shape; Error(usage)
  /// if a file has a tensor that the layout does not know.
  LayoutRows(const std::filesystem::path& directory, Layout layout);

  const Contents& contents() const override { return layout_.contents; }
  void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const override;

  /// Returns the bytes of all tensors of the layout by dtype.
  std::map<std::string, std::int64_t> bytes_by_dtype() const;

 private:
  struct Opened {
    std::unique_ptr<SafetensorsFile> file;
    std::vector<const SafetensorsEntry*> entries;  // one per tensor of the layout
  };
  void read_stored(Part part, std::int64_t layer, parallel::Range rows, float* to) const;
  void scale_by_norms(Part part, std::int64_t layer, parallel::Range rows, float* to) const;

  Layout layout_;
  std::vector<Opened> files_;
};

/// Storage of matrices and of vectors in exported files.
struct Storage {
  kernels::Scalar matrices = kernels::Scalar::bf16, vectors = kernels::Scalar::fp32;
};

/// Writes the files of a layout into an existing directory, in pieces; each is synced. Throws Error(numeric) if a value
/// is not finite in its storage type, naming file and tensor.
void write(const RowSource& source, const Layout& layout, Storage storage, const std::filesystem::path& directory);

}  // namespace weft::interchange

// SPDX-License-Identifier: Apache-2.0
//
// Description of a directory of activation files.
//
//   DIR/chunk_{i}.hdf5|h5    layer_{l}/inputs, layer_{l}/targets   [rows, d_model]   fp32, fp16 or bf16
//   DIR/index.bin, DIR/metadata.json, DIR/norm_stats.json          sidecar files of the writer
//
// Two layouts use these files: that of crosslayer-coding, and Weft's own, which is recognised by its root attributes
// (format = "weft-activations", format_version, model, hook_inputs, hook_targets). The latter may hold the token of
// each row (row_tokens.hpp). Two others are read where there is no chunk file (storage/activation_file.hpp):
//
//   DIR/activations_split_{i}.safetensors   of CLT-Forge
//   DIR/NAME.hdf5|h5                        of crosslayer-transcoder, the only such file
//
// Invariants of a Description: file i is chunk_{i} or split i; all files have the same layers, width and stored type;
// inputs and targets of all layers of a file have the same number of rows; index and metadata, if present, are
// consistent with the files; every number was checked against the size of its file (describe.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/array.hpp"

namespace weft::dataset {

class RowSource;

struct FileDescription {
  std::string name = {};  ///< inside the directory
  std::int64_t bytes = 0;
  std::int64_t rows = 0;
  std::int64_t chunk_rows = 0;  ///< rows of the largest HDF5 chunk; 0 = contiguous
  bool compressed = false;      ///< some dataset has a filter or an unusual layout and must be read through HDF5
  std::int64_t modified = 0;    ///< nanoseconds since 1970; not part of the fingerprint
  std::string probe = {};       ///< row_probe (row_sample.hpp); "" = not compared
};

struct Description {
  std::string path = {};    ///< the directory
  bool own_layout = false;  ///< the layout is Weft's own
  std::string layout =
      {};  ///< layout of another program (storage/activation_file.hpp); "" = Weft's own or crosslayer-coding's
  std::string model = {};        ///< "" = unknown
  std::string hook_inputs = {};  ///< "" = unknown: the layout of crosslayer-coding does not store it
  std::string hook_targets = {};
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_rows = 0;
  kernels::Scalar dtype = kernels::Scalar::fp32;  ///< fp32, fp16 or bf16
  std::vector<FileDescription> files = {};        ///< in the order of their ids: "stored order"
  bool has_statistics = false;                    ///< norm_stats.json exists
  bool targets_are_inputs = false;  ///< data.targets: batches and statistics have the inputs as their targets
  bool has_tokens = false;          ///< rows have token ids (row_tokens.hpp)
  std::int64_t n_documents = 0;     ///< parts of documents, each in one file; 0 = unknown
  bool has_vocabulary = false;      ///< vocabulary.json exists, and rows have token ids
  /// "ends:HEX,rows:HEX" (dataset/fingerprint.hpp): sha256 of names, sizes, shapes, type and the first and last data of
  /// each file, and of a sample of rows inside each file (row_sample.hpp).
  std::string fingerprint = {};
  std::vector<std::string> notes = {};  ///< remarks for the user that are not errors, one sentence each
  /// Computes the rows when they are read (row_source.hpp); null: they are in the files. Must outlive all readers.
  RowSource* source = nullptr;
  std::int64_t source_bytes = 0;  ///< memory of the source where the kernels run

  /// Bytes of one row of inputs (or of targets): all layers, as stored.
  std::int64_t row_bytes() const { return n_layers * d_model * kernels::bytes_of(dtype); }
  std::string file_path(std::int64_t file) const { return path + "/" + files[static_cast<std::size_t>(file)].name; }
};

/// Lossless text form (JSON).
std::string to_text(const Description&);
Description description_from_text(const std::string& text);

/// "fp32", "fp16", "bf16".
std::string_view name_of(kernels::Scalar);

/// The text that `weft inspect` prints.
std::string summary(const Description&);

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
//
// What a directory of activation files holds, found out from headers and a small sample before anything else is read.
//
//   DIR/chunk_{i}.hdf5|h5    layer_{l}/inputs, layer_{l}/targets   [rows, d_model]   fp32, fp16 or bf16
//   DIR/index.bin, DIR/metadata.json, DIR/norm_stats.json          what the writer says about them
//
// Two layouts share these files: crosslayer-coding's, and Weft's own, which adds root attributes (format =
// "weft-activations", format_version, model, hook_inputs, hook_targets) and is recognised by them.
//
// Invariants of a Description: file i is chunk_{i}; every file has all layers, inputs and targets, with one width, one
// stored type and one number of rows per file; index and metadata, where present, agree; every number was checked
// against the size of the file that it came from. Files are opened read-only and never changed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/settings.hpp"
#include "kernels/array.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

struct FileDescription {
  std::string name;  ///< inside the directory
  std::int64_t bytes = 0;
  std::int64_t rows = 0;
  std::int64_t chunk_rows = 0;  ///< rows of the largest HDF5 chunk; 0 = contiguous
  bool compressed = false;      ///< some dataset must be read through HDF5: it has a filter or an unusual layout
};

struct Description {
  std::string path;         ///< the directory
  bool own_layout = false;  ///< Weft's own
  std::string model;        ///< "" = not said
  std::string hook_inputs;  ///< "" = not said: crosslayer-coding's layout has no place for it
  std::string hook_targets;
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_rows = 0;
  kernels::Scalar dtype = kernels::Scalar::fp32;  ///< fp32, fp16 or bf16
  std::vector<FileDescription> files;             ///< in the order of their ids: "stored order"
  bool has_statistics = false;                    ///< norm_stats.json is there
  std::string fingerprint;         ///< sha256 of names, sizes, shapes, type and the ends of each file's data
  std::vector<std::string> notes;  ///< what a user should know and is no error, one sentence each

  /// Bytes of one row of inputs (or of targets): all layers, as stored.
  std::int64_t row_bytes() const { return n_layers * d_model * kernels::bytes_of(dtype); }
  std::string file_path(std::int64_t file) const { return path + "/" + files[static_cast<std::size_t>(file)].name; }
};

/// Replaces ${NAME} and $NAME. Throws a collective Error(usage) for a variable that is not set.
std::string expand_environment(std::string_view text);

/// Reads the headers and a sample of every file. Throws Error(data), naming file and dataset, for what is missing,
/// torn, inconsistent, not finite or not of settings.layers and settings.d_model, and for 16-bit data without a
/// negative number (a known defect of a writer). Of compressed files at most about 2 GiB are unpacked for the sample.
Description describe(const std::string& path, const Settings&);
/// The same on all ranks: rank 0 reads, the others are told. What it throws is known to all.
Description describe(const parallel::World&, const std::string& path, const Settings&);

/// A set that is not there yet, to plan for: settings.layers and settings.d_model, bf16, files of a window's rows; how
/// many there will be is not known (n_rows = 0).
Description imagined(const std::string& path, const Settings&);

/// Lossless text form (JSON).
std::string to_text(const Description&);
Description description_from_text(const std::string& text);

/// "fp32", "fp16", "bf16".
std::string_view name_of(kernels::Scalar);

/// A paragraph for people: what `weft inspect` prints.
std::string summary(const Description&);

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
//
// Writes datasets in Weft's own layout (description.hpp): chunk files, then index.bin and metadata.json. `describe`
// rejects a dataset without these two as unfinished. Never overwrites files. A writer that is destroyed before it has
// finished removes the files that it has written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/array.hpp"
#include "storage/activation_file_writer.hpp"

namespace weft::dataset {

enum class Compression { none, gzip };

struct WriterSettings {
  std::string path;  ///< directory, created if necessary; must not hold a dataset
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  kernels::Scalar dtype = kernels::Scalar::bf16;  ///< fp32, fp16 or bf16
  std::int64_t rows_per_file = 100'000;
  Compression compression = Compression::none;
  std::string model, hook_inputs, hook_targets;  ///< root attributes
  std::string dataset, split;                    ///< for metadata.json
  bool tokens = false;                           ///< rows have token ids
  std::vector<std::string> vocabulary = {};      ///< text of each id, UTF-8; empty: vocabulary.json is not written
};

class ActivationWriter {
 public:
  /// Throws Error(usage) for impossible sizes, Error(io) if the directory cannot be created or holds a dataset.
  explicit ActivationWriter(const WriterSettings&);
  ~ActivationWriter();

  /// Appends rows: inputs and targets [rows, n_layers * d_model] of settings.dtype. With settings.tokens also `ids`,
  /// one per row, and `documents`, those of the appended rows (counted from 0, ascending) at which a document begins.
  void append(std::int64_t rows, const std::byte* inputs, const std::byte* targets,
              std::span<const std::int32_t> ids = {}, std::span<const std::int64_t> documents = {});
  /// Closes the last file and writes index.bin and metadata.json. Must be called; throws Error(io).
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The attributes at the root of each chunk file of a dataset, and the shape of the file.
std::map<std::string, std::string> root_attributes(const WriterSettings&);
storage::ActivationFileWriter::Shape file_shape(const WriterSettings&);
/// The shape of a file whose number of rows is known.
storage::ActivationFileWriter::Shape whole_file_shape(const WriterSettings&, std::int64_t rows);
/// vocabulary.json, index.bin and metadata.json, which complete a dataset: after all its chunk files. Throws Error(io).
void write_index(const WriterSettings&, std::span<const std::int64_t> rows_of_files);

/// Converts values [n] to raw values of `type` (fp32, fp16, bf16), rounding to nearest even.
void store_as(kernels::Scalar type, const float* values, std::int64_t n, std::byte* raw);

}  // namespace weft::dataset

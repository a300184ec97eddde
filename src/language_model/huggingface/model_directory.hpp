// SPDX-License-Identifier: Apache-2.0
//
// A directory in the layout of Hugging Face: config.json, model.safetensors or its parts with
// model.safetensors.index.json, tokenizer.json.
//
// Files are untrusted. Every tensor of the model is looked up, with its shape and type, before memory for the model is
// allocated.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "language_model/huggingface/config.hpp"
#include "language_model/huggingface/names.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "storage/safetensors.hpp"

namespace weft::language_model {

/// True if the directory has a config.json, and weights or parts of weights.
bool is_huggingface_directory(const std::filesystem::path&);
/// Its config.json. Throws as read_config, and Error(data) if the file cannot be read.
HuggingfaceConfig read_config_of(const std::filesystem::path& directory);

class HuggingfaceDirectory {
 public:
  /// Throws Error(data) that names file and tensor, Error(usage) naming what Weft lacks.
  explicit HuggingfaceDirectory(std::filesystem::path);

  const std::filesystem::path& path() const { return path_; }
  const HuggingfaceConfig& config() const { return config_; }
  /// Architecture for sequences of up to `length` tokens. Throws a collective Error(usage) if these are more than the
  /// learned positions.
  Architecture architecture(std::int64_t length) const;

  /// Throws a collective Error(usage) that lists the settings that are not those of the model; dropout and sparse
  /// attention may differ.
  void require(const ModelSettings&) const;

  /// Reads all parameters, with fp32 storage exactly: of each, the rows that this rank holds. They are those of
  /// architecture(). Needs host memory for one matrix in fp32.
  void load(const model::Parameters&, const kernels::Execution&) const;

  /// Tokeniser of the directory; none if there is neither tokenizer.json nor the file of a Weft tokeniser. Throws
  /// Error(data).
  std::optional<Tokenizer> tokenizer() const;

  /// Text with family, sizes, types of storage and files, and the table of an input that has this model.
  std::string summary() const;

 private:
  struct Stored {
    std::size_t file = 0;
    storage::SafetensorsEntry entry;
  };
  void open_parts(const std::filesystem::path& index);
  const Stored& stored(const Place&) const;
  void read_rows(const model::ParameterSpec&, const Place&, parallel::Range held, std::vector<float>& rows) const;
  void check();
  std::string stored_head() const;
  void require_same_head(const std::string& name) const;

  std::filesystem::path path_;
  HuggingfaceConfig config_;
  std::vector<storage::SafetensorsFile> files_;
  std::map<std::string, Stored, std::less<>> tensors_;  // by name
  std::string prefix_;  // of the library's names that these files leave out: "transformer." or "model."
};

/// Writes a model in this layout; `directory` appears complete, by a rename. `type`: of all tensors, fp32 or bf16.
/// Files have at most `file_bytes`, or one tensor. The files of the tokeniser: write_tokenizer_files.
/// Throws Error(usage) if the directory exists and is not empty, or if the transformers library
/// lacks the model; Error(io), Error(numeric) for values that are not finite.
void write_huggingface(const model::Parameters&, const Architecture&, const std::optional<Tokenizer>&,
                       kernels::Scalar type, std::int64_t file_bytes, const kernels::Execution&,
                       const std::filesystem::path& directory);

}  // namespace weft::language_model

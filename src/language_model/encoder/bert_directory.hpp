// SPDX-License-Identifier: Apache-2.0
//
// A directory of an encoder of the transformers library, model_type "bert": config.json and model.safetensors.
//
// Files are untrusted. Every tensor is looked up, with its shape and type, before memory is allocated.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/language/activation/mlp_activation.hpp"
#include "storage/safetensors.hpp"

namespace weft::language_model {

/// Sizes and arithmetic of an encoder (Devlin et al. 2019): learned positions, norms after the sums of the residual
/// stream.
struct EncoderShape {
  std::int64_t vocabulary = 0, positions = 0, token_types = 0;
  std::int64_t layers = 0, heads = 0, d_model = 0, d_mlp = 0;
  kernels::MlpActivation mlp = kernels::MlpActivation::gelu_exact;
  float norm_epsilon = 1e-12f;

  std::int64_t head_size() const { return d_model / heads; }
};

/// A parameter of an encoder: its name in the library, without "bert.", and its shape.
struct EncoderParameter {
  std::string name;
  std::vector<std::int64_t> shape;

  std::int64_t elements() const;
};

/// All parameters. Query, key and value of a layer follow one another, first their weights, then their biases: together
/// they are one matrix and one vector.
std::vector<EncoderParameter> encoder_parameters(const EncoderShape&);

/// True if the config.json of a directory says that it is such a model; false without the file.
bool is_bert_directory(const std::filesystem::path&);

class BertDirectory {
 public:
  /// Throws Error(data) that names file and tensor, Error(usage) naming what Weft lacks.
  explicit BertDirectory(const std::filesystem::path&);

  const EncoderShape& shape() const { return shape_; }
  /// Reads all elements of a parameter.
  void read(const EncoderParameter&, float* to) const;

 private:
  const storage::SafetensorsEntry& entry(const EncoderParameter&) const;

  EncoderShape shape_;
  storage::SafetensorsFile file_;
  std::string prefix_;  // "bert." where the file has it
};

}  // namespace weft::language_model

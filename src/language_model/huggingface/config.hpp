// SPDX-License-Identifier: Apache-2.0
//
// config.json of the transformers library of Hugging Face <-> settings of a model.
//
//   model_type   norm     positions       further
//   gpt2         layer    learned         biases, GELU (tanh form)
//   llama        RMS      rotary, scaled  gated MLP, fewer heads of keys
//   qwen3        RMS      rotary, scaled  and norms of queries and keys by head
//   olmo2        RMS      rotary, scaled  and norms of queries and keys over all heads, norms after the sublayers
//   gemma2       RMS      rotary          gated MLP, norms before and after, caps, windows, scaled embedding
//
// An unknown key is an error: it may change what the model computes.
#pragma once

#include <string>
#include <string_view>

#include "base/json.hpp"
#include "kernels/array.hpp"
#include "language_model/blocks/model_parameters.hpp"

namespace weft::language_model {

enum class Family { gpt2, llama, qwen3, olmo2, gemma2 };

/// Value of model_type for a family.
std::string_view name(Family);

struct HuggingfaceConfig {
  Family family = Family::gpt2;
  ModelSettings model;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< longest context of the training; gpt2: rows of the table of positions
};

/// Throws, with messages that begin with `path`, Error(data) if the text is not such a file, Error(usage) naming what
/// Weft lacks.
HuggingfaceConfig read_config(std::string_view text, const std::string& path);

/// The family in which the transformers library has this model. Throws a collective Error(usage) that names the first
/// setting that it lacks.
Family family_of(const ModelSettings&);
/// Text of config.json, the inverse of read_config; the vocabulary and the positions are those of the architecture.
/// `type`: of the weights; `end`: id of the end of a text, -1 if there is none.
std::string config_text(const Architecture&, Family, kernels::Scalar type, std::int64_t end);

/// Table [language_model] of an input, as TOML.
std::string table_of(const ModelSettings&);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// config.json of the transformers library of Hugging Face <-> settings of a model.
//
// What is common to all families; keys/model_family.hpp describes one.
//
// An unknown key is an error: it may change what the model computes.
#pragma once

#include <string>
#include <string_view>

#include "kernels/array.hpp"
#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model {

/// Throws, with messages that begin with `path`, Error(data) if the text is not such a file, Error(usage) naming what
/// Weft lacks.
HuggingfaceConfig read_config(std::string_view text, const std::string& path);

/// The family of the files that the model came from, if it can express the model, or the first one that can. Throws a
/// collective Error(usage) that names the nearest one and the settings that it lacks.
const Family& family_of(const Architecture&);
/// Text of config.json, the inverse of read_config; the vocabulary and the positions are those of the architecture.
/// `type`: of the weights; `end`: id of the end of a text, -1 if there is none.
std::string config_text(const Architecture&, const Family&, kernels::Scalar type, std::int64_t end);

/// Table [language_model] of an input, as TOML.
std::string table_of(const ModelSettings&);

}  // namespace weft::language_model

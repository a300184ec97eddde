// SPDX-License-Identifier: Apache-2.0
//
// The families of the transformers library that Weft reads and writes.
#pragma once

#include <span>

#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model::families {

const Family& gpt2();
const Family& gpt_neox();
const Family& llama();
const Family& mistral();
const Family& qwen2();
const Family& qwen3();
const Family& gemma3_text();
const Family& phi3();
const Family& smollm3();
const Family& olmo2();
const Family& gemma2();

/// All of them. A model that several can express is written as the first.
std::span<const Family* const> all();

}  // namespace weft::language_model::families

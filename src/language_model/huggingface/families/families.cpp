// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/families/families.hpp"

namespace weft::language_model::families {

std::span<const Family* const> all() {
  static const Family* const kAll[] = {&gpt2(),   &llama(),       &mistral(), &qwen2(),   &qwen3(),   &olmo2(),
                                       &gemma2(), &gemma3_text(), &phi3(),    &smollm3(), &gpt_neox()};
  return kAll;
}

}  // namespace weft::language_model::families

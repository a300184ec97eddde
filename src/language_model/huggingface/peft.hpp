// SPDX-License-Identifier: Apache-2.0
//
// Low-rank adapters in the files of PEFT of Hugging Face: adapter_config.json and adapter_model.safetensors.
//
//   base_model.model.MODULE.lora_A.weight   [r, inputs]
//   base_model.model.MODULE.lora_B.weight   [outputs, r]        y += lora_alpha / r (x Aᵀ) Bᵀ
//
// MODULE is the linear layer of the transformers library. GPT-2 has query, key and value in one, "attn.c_attn": the
// adapters of k of them are written as one of rank k r, with their A one below the other and their B as the blocks of a
// diagonal; rank_pattern and alpha_pattern of the configuration say so. A file of PEFT itself has one A for all three:
// each gets a copy when it is read.
#pragma once

#include <filesystem>
#include <string>

#include "language_model/step/adapters.hpp"

namespace weft::language_model {

/// True if the directory has an adapter_config.json.
bool is_peft_directory(const std::filesystem::path&);

/// `adapters`: parameters of adapter_specs(architecture) on one process. `base`: name or path of the model that they
/// belong to. `type`: of the tensors, fp32 or bf16. The directory appears complete, by a rename. Throws Error(usage) if
/// it exists and is not empty, or if the transformers library lacks the model; Error(io), Error(numeric) for values
/// that are not finite.
void write_peft(const model::Parameters& adapters, const Architecture&, const std::string& base, kernels::Scalar type,
                const kernels::Execution&, const std::filesystem::path& directory);

/// Throws Error(usage) unless the adapters of the directory are those of the architecture: rank, alpha, linear layers,
/// and for every key of its configuration that Weft lacks (peft_config.hpp); Error(data) for files that are not such a
/// directory's, or whose tensors have other shapes.
void require_peft(const Architecture&, const std::filesystem::path& directory);
/// Fills the adapters among the parameters of a model. Throws as require_peft.
void load_peft(const model::Parameters&, const Architecture&, const kernels::Execution&,
               const std::filesystem::path& directory);

}  // namespace weft::language_model

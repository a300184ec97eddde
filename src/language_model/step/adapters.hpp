// SPDX-License-Identifier: Apache-2.0
//
// The parameters of low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685). A target W [outputs, inputs] gets
//
//   W + alpha / rank B A      A [rank, inputs] "…/lora_a", B [outputs, rank] "…/lora_b"
//
// A begins uniform in +-1 / sqrt(inputs) (Kaiming uniform with slope sqrt(5), as in PEFT), B with 0: a run begins with
// the function of its initial model. All other parameters are frozen. They are in every checkpoint of the run, so that
// one can be used alone.
#pragma once

#include <vector>

#include "language_model/blocks/parameter_list.hpp"

namespace weft::language_model {

/// The adapters alone, as they are among parameter_specs(architecture).
std::vector<model::ParameterSpec> adapter_specs(const Architecture&);

/// The frozen parameters, stored as they are among parameter_specs(architecture) (LoraSettings::base).
std::vector<model::ParameterSpec> frozen_specs(const Architecture&);

/// Gives the parameters of `to` the weights of those of the same names, which may be stored in another type. Both on
/// one process.
void copy_weights(const model::Parameters& from, const model::Parameters& to, const kernels::Execution&);

/// The model without adapters, to which the adapters are added.
Architecture base_of(Architecture);

/// W += alpha / rank B A for each adapter: then the base model has the function of the adapted one but for the rounding
/// of its weights. `base`: parameters of base_of(architecture); `adapters`: of adapter_specs(architecture); both on one
/// process. The product is formed in fp32. Throws Error(numeric) if a sum is not finite.
void merge(const model::Parameters& adapters, const Architecture&, const model::Parameters& base,
           const kernels::Execution&);

}  // namespace weft::language_model

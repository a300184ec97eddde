// SPDX-License-Identifier: Apache-2.0
//
// Table [lora]: low-rank adapters of the linear layers (Hu et al. 2021, arXiv 2106.09685).
#pragma once

#include "input/schema.hpp"
#include "language_model/blocks/model_settings.hpp"

namespace weft::language_model {

/// Keys of [lora] with their conditions. `model` must outlive the schema; its keys were added before.
void add_keys(input::Schema&, LoraSettings&, const ModelSettings& model);

}  // namespace weft::language_model

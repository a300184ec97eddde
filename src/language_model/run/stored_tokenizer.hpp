// SPDX-License-Identifier: Apache-2.0
// The tokeniser of a model in its checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint/registry.hpp"
#include "checkpoint/resume.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "parallel/world.hpp"

namespace weft::language_model {

/// The tokeniser of the model in a checkpoint: the tensor "tokenizer". None: the model was trained on token files
/// without one. Throws a collective Error(data) if its text is not that of a tokeniser. Collective.
std::optional<Tokenizer> stored_tokenizer(const checkpoint::Found&, const parallel::World&, const kernels::Execution&);

/// The tensor that stored_tokenizer reads. `text` is its memory and must outlive the registry.
checkpoint::Tensor tokenizer_tensor(std::vector<std::uint8_t>& text, bool writes);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The sizes of a language model, and its parts on the ranks of the tensor axis.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "language_model/blocks/model_settings.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// A model's sizes and options, with those that come from the data.
struct Architecture {
  ModelSettings model;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< longest sequence that is computed: rows of the table of rotary positions
  LoraSettings lora = {};      ///< adapters of the model's linear layers (step/adapters.hpp)
  std::int64_t context = 0;    ///< longest text of the model, where that is more (longest_text)
  /// Family of the files of Hugging Face that the model came from (huggingface/keys/model_family.hpp); "": none.
  /// Exports keep it.
  std::string family = {};
  /// Position of a part of a model (part_of): number of ranks, rank, first token of its vocabulary, first query head,
  /// vocabulary of the whole model.
  std::int64_t tensor_ranks = 1, tensor_rank = 0, first_token = 0, first_head = 0, all_tokens = 0;

  std::int64_t whole_vocabulary() const { return tensor_ranks == 1 ? vocabulary : all_tokens; }
  /// Vocabulary of the largest part, the same on all ranks.
  std::int64_t largest_vocabulary() const { return parallel::largest_part(whole_vocabulary(), tensor_ranks); }

  /// Tokens of the longest text: rows of the table of learned positions, longest context in files of other programs. A
  /// model that is trained on shorter sequences keeps it.
  std::int64_t longest_text() const { return std::max(positions, context); }
  std::int64_t query_width() const { return model.heads * model.head_size(); }
  std::int64_t key_width() const { return model.kv_heads * model.head_size(); }
  std::int64_t projection_width() const { return query_width() + 2 * key_width(); }
};

/// Prefix of the names of a block's parameters: "block_3/".
std::string block_name(std::int64_t layer);

/// Columns of the MLP that stay together, if its width allows: rows of whole 16-byte words.
std::int64_t mlp_unit(const ModelSettings&);

/// The part of the model on rank `rank` of `n_ranks` of the tensor axis: whole heads of keys with their heads of
/// queries, a part of the width of the MLP and of the vocabulary. Sizes of its products and buffers; the residual
/// stream is whole.
Architecture part_of(const Architecture&, std::int64_t n_ranks, std::int64_t rank);
/// The part of the model on a rank of a grid; the whole model if the grid has no tensor axis.
Architecture part_of(const Architecture&, const parallel::GridShape&, std::int64_t rank);
/// Why the model cannot be divided over so many ranks of the tensor axis; "" if it can. vocabulary 0: not known yet.
std::string obstacle_to_division(const Architecture&, std::int64_t n_ranks);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/architecture.hpp"

#include <fmt/format.h>

#include <numeric>

namespace weft::language_model {

std::string block_name(std::int64_t layer) { return fmt::format("block_{}/", layer); }

std::int64_t mlp_unit(const ModelSettings& model) { return std::gcd(model.d_mlp, std::int64_t{8}); }

Architecture part_of(const Architecture& whole, std::int64_t n_ranks, std::int64_t rank) {
  Architecture part = whole;
  ModelSettings& model = part.model;
  const parallel::Range keys = parallel::part(whole.model.kv_heads, n_ranks, rank),
                        tokens = parallel::part(whole.vocabulary, n_ranks, rank);
  const std::int64_t sharing = whole.model.heads / whole.model.kv_heads, unit = mlp_unit(whole.model);
  model.own_head_size = whole.model.head_size();
  model.kv_heads = keys.size();
  model.heads = keys.size() * sharing;
  model.d_mlp = parallel::part(whole.model.d_mlp / unit, n_ranks, rank).size() * unit;
  part.vocabulary = tokens.size();
  part.tensor_ranks = n_ranks;
  part.tensor_rank = rank;
  part.first_token = tokens.begin;
  part.all_tokens = whole.vocabulary;
  part.first_head = keys.begin * sharing;
  return part;
}

Architecture part_of(const Architecture& whole, const parallel::GridShape& grid, std::int64_t rank) {
  const std::int64_t n_ranks = grid.size(parallel::kTensorAxis);
  return n_ranks == 1 ? whole : part_of(whole, n_ranks, grid.index_of(rank, parallel::kTensorAxis));
}

std::string obstacle_to_division(const Architecture& architecture, std::int64_t n_ranks) {
  const ModelSettings& model = architecture.model;
  if (n_ranks == 1) return {};
  if (n_ranks > model.kv_heads)
    return fmt::format(
        "parallel.tensor = {} with language_model.kv_heads = {} (each rank has whole heads of keys, and none is kept "
        "twice); take at most {}",
        n_ranks, model.kv_heads, model.kv_heads);
  if (const std::int64_t parts = model.d_mlp / mlp_unit(model); n_ranks > parts)
    return fmt::format(
        "parallel.tensor = {} with language_model.d_mlp = {} (each rank has a part of {} columns or more)"
        "; take at most {}",
        n_ranks, model.d_mlp, mlp_unit(model), parts);
  if (architecture.vocabulary > 0 && n_ranks > architecture.vocabulary)
    return fmt::format("parallel.tensor = {} with a vocabulary of {} (each rank has a part of it); take at most {}",
                       n_ranks, architecture.vocabulary, architecture.vocabulary);
  return {};
}

}  // namespace weft::language_model

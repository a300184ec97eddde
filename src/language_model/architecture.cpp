// SPDX-License-Identifier: Apache-2.0
#include "language_model/architecture.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "language_model/adapters.hpp"

namespace weft::language_model {

using training::Cut;
using training::ParameterSpec;

namespace {

constexpr double kDeviation = 0.02;
/// Products over the vocabulary are fast on a GPU if it is a multiple of this.
constexpr std::int64_t kHeadRows = 64;
/// Columns of the MLP that stay together, if its width allows: rows of whole 16-byte words.
std::int64_t mlp_unit(const ModelSettings& model) { return std::gcd(model.d_mlp, std::int64_t{8}); }

constexpr Cut by_output(std::int64_t unit = 1) { return {0, parallel::kTensorAxis, unit}; }
constexpr Cut by_input(std::int64_t unit) { return {1, parallel::kTensorAxis, unit}; }

/// Adds outputs of a product that are stored next to those of other products; `unit` of them stay together.
struct Outputs {
  const char* name;
  std::int64_t width, unit;
};

/// Appends specs to a list.
class Specs {
 public:
  explicit Specs(const ModelSettings& model) : model_(model) {}

  /// Adds a matrix [rows, columns].
  void matrix(std::string name, std::int64_t rows, std::int64_t columns, Cut cut, std::string group,
              double deviation = kDeviation) {
    specs.push_back({.name = std::move(name),
                     .shape = {rows, columns},
                     .cut = cut,
                     .initial = training::normal(deviation, kernels::Purpose::model_initial),
                     .weight_decay = true,
                     .group = std::move(group)});
  }
  void vector(std::string name, std::int64_t size, double value, Cut cut = {}, std::string group = {}) {
    specs.push_back({.name = std::move(name),
                     .shape = {size},
                     .cut = cut,
                     .update = training::Update::everywhere,
                     .initial = training::constant(value),
                     .group = std::move(group)});
  }
  /// Adds a vector whose gradient is a sum over the heads; a rank of the tensor axis has some of the heads.
  void shared_by_heads(std::string name, std::int64_t size) {
    vector(std::move(name), size, 1);
    specs.back().partial_gradient = true;
  }
  void norm(const std::string& name) {
    vector(name + "/weight", model_.d_model, 1);
    if (model_.norm == Norm::layer && model_.bias) vector(name + "/bias", model_.d_model, 0);
  }
  /// Adds matrices of one input with adjacent outputs: in one group, then their biases in another.
  void projections(const std::string& prefix, const std::vector<Outputs>& outputs) {
    std::string group = prefix;
    for (const Outputs& one : outputs) group += std::string(one.name) + "_";
    for (const auto& [name, width, unit] : outputs)
      matrix(prefix + name + "/weight", width, model_.d_model, by_output(unit), group + "weight");
    if (!model_.bias) return;
    for (const auto& [name, width, unit] : outputs)
      vector(prefix + name + "/bias", width, 0, by_output(unit), group + "bias");
  }
  /// Adds a matrix that writes to the residual stream. Its bias is added once, on whole rows.
  void output(const std::string& name, std::int64_t inputs, std::int64_t unit) {
    const double deviation = kDeviation / std::sqrt(2.0 * static_cast<double>(model_.layers));
    matrix(name + "/weight", model_.d_model, inputs, by_input(unit), "", deviation);
    if (model_.bias) vector(name + "/bias", model_.d_model, 0);
  }

  std::vector<ParameterSpec> specs;

 private:
  const ModelSettings& model_;
};

void add_attention(Specs& specs, const Architecture& a, const std::string& block) {
  const ModelSettings& model = a.model;
  const std::string attention = block + "attention/";
  if (model.normalises_inputs()) specs.norm(block + "attention_norm");
  const std::int64_t key_unit = model.head_size(), query_unit = model.heads / model.kv_heads * key_unit;
  specs.projections(
      attention,
      {{"query", a.query_width(), query_unit}, {"key", a.key_width(), key_unit}, {"value", a.key_width(), key_unit}});
  if (model.qk_norm == QueryKeyNorm::head) {
    specs.shared_by_heads(attention + "query_norm/weight", model.head_size());
    specs.shared_by_heads(attention + "key_norm/weight", model.head_size());
  } else if (model.qk_norm == QueryKeyNorm::width) {
    specs.vector(attention + "query_norm/weight", a.query_width(), 1, by_output(query_unit));
    specs.vector(attention + "key_norm/weight", a.key_width(), 1, by_output(key_unit));
  } else if (model.qk_norm == QueryKeyNorm::scaled) {
    specs.shared_by_heads(attention + "temperature", 1);
  }
  specs.output(attention + "output", a.query_width(), query_unit);
  if (model.normalises_outputs()) specs.norm(block + "attention_post_norm");
}

void add_mlp(Specs& specs, const Architecture& a, const std::string& block) {
  const ModelSettings& model = a.model;
  if (model.normalises_inputs()) specs.norm(block + "mlp_norm");
  if (kernels::is_gated(model.mlp))
    specs.projections(block + "mlp/", {{"gate", model.d_mlp, mlp_unit(model)}, {"up", model.d_mlp, mlp_unit(model)}});
  else
    specs.projections(block + "mlp/", {{"up", model.d_mlp, mlp_unit(model)}});
  specs.output(block + "mlp/down", model.d_mlp, mlp_unit(model));
  if (model.normalises_outputs()) specs.norm(block + "mlp_post_norm");
}

}  // namespace

std::string block_name(std::int64_t layer) { return fmt::format("block_{}/", layer); }

std::vector<ParameterSpec> parameter_specs(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Specs specs(model);
  specs.matrix("embedding/tokens", architecture.vocabulary, model.d_model, by_output(), "");
  if (model.tied) specs.specs.back().row_multiple = kHeadRows;
  if (model.position == Position::learned)
    specs.matrix("embedding/positions", architecture.longest_text(), model.d_model, {}, "");
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    add_attention(specs, architecture, block_name(layer));
    add_mlp(specs, architecture, block_name(layer));
  }
  specs.norm("final_norm");
  if (!model.tied) {
    specs.matrix("head/weight", architecture.vocabulary, model.d_model, by_output(), "");
    specs.specs.back().row_multiple = kHeadRows;
  }
  training::number_elements(specs.specs);
  if (architecture.lora.rank > 0) add_adapters(specs.specs, architecture);
  return std::move(specs.specs);
}

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
  if (model.qk_norm == QueryKeyNorm::width)
    return fmt::format(
        "parallel.tensor = {} with language_model.qk_norm = \"width\" (its norm is over all heads, which are on "
        "several ranks); take parallel.tensor = 1",
        n_ranks);
  return {};
}

std::int64_t parameters_of(const Architecture& architecture) {
  return training::elements_of(parameter_specs(architecture));
}

double flops_per_token(const Architecture& architecture, std::int64_t length) {
  const ModelSettings& model = architecture.model;
  const double attention = static_cast<double>(model.layers) * static_cast<double>(length * architecture.query_width());
  const std::vector<ParameterSpec> specs = parameter_specs(architecture);
  return 4.0 * static_cast<double>(training::elements_of(specs)) +
         2.0 * static_cast<double>(training::trained_elements_of(specs)) + 6.0 * attention;
}

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/architecture.hpp"

#include <fmt/format.h>

#include <cmath>

#include "language_model/adapters.hpp"

namespace weft::language_model {

using training::Cut;
using training::ParameterSpec;

namespace {

constexpr double kDeviation = 0.02;
/// Products over the vocabulary are fast on a GPU if it is a multiple of this.
constexpr std::int64_t kHeadRows = 64;
constexpr Cut kByOutput{0, parallel::kTensorAxis}, kByInput{1, parallel::kTensorAxis};

/// Appends specs to a list.
class Specs {
 public:
  explicit Specs(const ModelSettings& model) : model_(model) {}

  /// A matrix [rows, columns].
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
  void norm(const std::string& name) {
    vector(name + "/weight", model_.d_model, 1);
    if (model_.norm == Norm::layer && model_.bias) vector(name + "/bias", model_.d_model, 0);
  }
  /// Matrices of one input whose outputs lie one beside the other: in one group, then their biases in another.
  void projections(const std::string& prefix, const std::vector<std::pair<std::string, std::int64_t>>& outputs) {
    std::string group = prefix;
    for (const auto& [name, width] : outputs) group += name + "_";
    for (const auto& [name, width] : outputs)
      matrix(prefix + name + "/weight", width, model_.d_model, kByOutput, group + "weight");
    if (!model_.bias) return;
    for (const auto& [name, width] : outputs) vector(prefix + name + "/bias", width, 0, kByOutput, group + "bias");
  }
  /// A matrix that writes to the residual stream. Its bias is added once, on whole rows.
  void output(const std::string& name, std::int64_t inputs) {
    const double deviation = kDeviation / std::sqrt(2.0 * static_cast<double>(model_.layers));
    matrix(name + "/weight", model_.d_model, inputs, kByInput, "", deviation);
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
  specs.projections(attention, {{"query", a.query_width()}, {"key", a.key_width()}, {"value", a.key_width()}});
  if (model.qk_norm == QueryKeyNorm::head) {  // shared by all heads
    specs.vector(attention + "query_norm/weight", model.head_size(), 1);
    specs.vector(attention + "key_norm/weight", model.head_size(), 1);
  } else if (model.qk_norm == QueryKeyNorm::width) {
    specs.vector(attention + "query_norm/weight", a.query_width(), 1, kByOutput);
    specs.vector(attention + "key_norm/weight", a.key_width(), 1, kByOutput);
  } else if (model.qk_norm == QueryKeyNorm::scaled) {
    specs.vector(attention + "temperature", 1, 1);
  }
  specs.output(attention + "output", a.query_width());
  if (model.normalises_outputs()) specs.norm(block + "attention_post_norm");
}

void add_mlp(Specs& specs, const Architecture& a, const std::string& block) {
  const ModelSettings& model = a.model;
  if (model.normalises_inputs()) specs.norm(block + "mlp_norm");
  if (kernels::is_gated(model.mlp))
    specs.projections(block + "mlp/", {{"gate", model.d_mlp}, {"up", model.d_mlp}});
  else
    specs.projections(block + "mlp/", {{"up", model.d_mlp}});
  specs.output(block + "mlp/down", model.d_mlp);
  if (model.normalises_outputs()) specs.norm(block + "mlp_post_norm");
}

}  // namespace

std::string block_name(std::int64_t layer) { return fmt::format("block_{}/", layer); }

std::vector<ParameterSpec> parameter_specs(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Specs specs(model);
  specs.matrix("embedding/tokens", architecture.vocabulary, model.d_model, kByOutput, "");
  if (model.tied) specs.specs.back().row_multiple = kHeadRows;
  if (model.position == Position::learned)
    specs.matrix("embedding/positions", architecture.positions, model.d_model, {}, "");
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    add_attention(specs, architecture, block_name(layer));
    add_mlp(specs, architecture, block_name(layer));
  }
  specs.norm("final_norm");
  if (!model.tied) {
    specs.matrix("head/weight", architecture.vocabulary, model.d_model, kByOutput, "");
    specs.specs.back().row_multiple = kHeadRows;
  }
  training::number_elements(specs.specs);
  if (architecture.lora.rank > 0) add_adapters(specs.specs, architecture);
  return std::move(specs.specs);
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

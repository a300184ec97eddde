// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/clipping_shape.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "language_model/step/transformer.hpp"

namespace weft::language_model {
namespace {

/// Columns of the inputs and output gradients of products that are copied if they are kept.
std::int64_t copied_columns(const Configuration& configuration, const Architecture& part) {
  const TransformerSettings settings = transformer_settings(configuration, part);
  const bool before_norms = part.model.normalises_outputs();
  std::map<std::string, std::int64_t> of_block;
  for (const Product& product : declared_parameters(part).products) {
    std::int64_t& copied = of_block[product.block()];
    for (const Outputs& outputs : product.parts)
      if (part.lora.adapts(outputs.name))
        copied += 2 * part.lora.rank + outputs.width + (settings.keeps_block_rows() ? 0 : product.inputs);
    if (!is_trained(part, product.prefix + product.parts.front().name + "/weight")) continue;
    copied += !settings.keeps_block_rows()              ? product.inputs + product.outputs()
              : product.writes_residual && before_norms ? product.outputs()
                                                        : 0;
  }
  std::int64_t all = 0, largest = 0;
  for (const auto& [block, columns] : of_block) {
    all += columns;
    largest = std::max(largest, columns);
  }
  // If parts are clipped separately, the rows of one block are kept at a time.
  return (configuration.privacy.sums_by_part() ? largest : all) +
         (settings.keeps_head_rows() || !trains_head(part) ? 0 : part.model.d_model + aligned_columns(part.vocabulary));
}

}  // namespace

privacy::ClippingShape clipping_shape(const Configuration& configuration, const Architecture& part) {
  const ModelSettings& model = part.model;
  const std::int64_t length = configuration.data.sequence, rows = configuration.micro_tokens(),
                     of_record = configuration.privacy.joins_sequences() ? configuration.privacy.max_per_owner : 1;
  privacy::ClippingShape shape{
      .examples = {.examples = rows / length, .most_rows = std::min(of_record * length, rows), .rows = rows},
      .sum_rows = model.qk_norm == QueryKeyNorm::head ? model.heads : 1,
      .type = activation_type(configuration),
      .kept_columns = copied_columns(configuration, part),
      .tensor_ranks = part.tensor_ranks};
  const std::vector<model::ParameterSpec> specs = parameter_specs(part);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].frozen) continue;
    const bool is_tokens = specs[i].name == "embedding/tokens";
    if (is_tokens && model.tied) shape.tied = i;
    if (specs[i].name == "embedding/positions" || (is_tokens && !model.tied)) shape.tables.push_back(i);
  }
  return shape;
}

}  // namespace weft::language_model

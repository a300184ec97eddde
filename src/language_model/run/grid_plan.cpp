// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/grid_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/format.hpp"
#include "language_model/run/planned_bytes.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/step/language_trainer.hpp"
#include "model/unit_memory.hpp"

namespace weft::language_model {
namespace {

/// Calls each(product, whether recomputation repeats it) for the products of all blocks.
template <class Each>
void each_product(const Configuration& configuration, const Architecture& architecture, const Each& each) {
  const std::vector<Product> products = declared_parameters(architecture).products;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const bool is_last = i + 1 == products.size() || products[i + 1].block() != products[i].block();
    each(products[i],
         configuration.memory.recompute == Recompute::block && (!is_last || architecture.model.normalises_outputs()));
  }
}

/// Sums over the ranks of the tensor axis in one micro-batch: of the embedding and the head, and one of each product
/// of a block, in the forward pass if it is divided by inputs, else in the backward pass. Recomputed blocks repeat
/// those of the forward pass that they need; the last block is not recomputed.
std::int64_t sums_of_activations(const Configuration& configuration, const Architecture& architecture) {
  const std::string last = block_name(architecture.model.layers - 1);
  std::int64_t sums = 2;
  each_product(configuration, architecture, [&](const Product& product, bool repeated) {
    sums += product.writes_residual && repeated && product.block() != last ? 2 : 1;
  });
  return sums;
}

/// Columns of the rows of adapters that are added up in a micro-batch: of what is divided by inputs in each forward
/// pass, and again in the backward pass; of the others in the backward pass.
std::int64_t adapter_columns(const Configuration& configuration, const Architecture& architecture) {
  std::int64_t sums = 0;
  each_product(configuration, architecture, [&](const Product& product, bool repeated) {
    const auto adapted = std::count_if(product.parts.begin(), product.parts.end(),
                                       [&](const Outputs& part) { return configuration.lora.adapts(part.name); });
    sums += adapted * (!product.writes_residual ? 1 : repeated ? 3 : 2);
  });
  return sums * configuration.lora.rank;
}

std::int64_t sent_over_tensor_axis(const Configuration& configuration, const Architecture& architecture) {
  const std::int64_t ranks = configuration.parallel.tensor, rows = configuration.rank_tokens();
  const std::int64_t columns = sums_of_activations(configuration, architecture) * architecture.model.d_model +
                               adapter_columns(configuration, architecture);
  return (ranks - 1) * (columns * 2 * rows * kernels::bytes_of(activation_type(configuration)) / ranks +
                        rows * static_cast<std::int64_t>(sizeof(kernels::SoftmaxPart)));
}

std::int64_t micro_batches(const Configuration& configuration) {
  return (configuration.rank_tokens() + configuration.micro_tokens() - 1) / configuration.micro_tokens();
}

/// By unit, how often a step gathers its weights: as Transformer and DataParallel do with parallel.shard = "full".
std::vector<std::int64_t> gatherings(const Configuration& configuration, std::span<const model::ParameterSpec> specs) {
  const model::UnitMemory units(specs, configuration.parallel.gathered_blocks, [](std::size_t) { return 0; });
  const auto blocks = static_cast<std::size_t>(configuration.language_model.layers);
  std::vector<std::int64_t> counts(blocks + 2);
  std::vector<std::size_t> in_slot(units.slots(), counts.size());
  const auto use = [&](std::size_t unit) {
    std::size_t& there = in_slot[units.slot_of(unit)];
    if (there != unit) ++counts[unit];
    there = unit;
  };
  for (std::int64_t micro = 0; micro < micro_batches(configuration); ++micro) {
    for (std::size_t unit = 0; unit <= blocks; ++unit) use(unit);
    use(configuration.language_model.tied ? 0 : blocks + 1);
    for (std::size_t unit = blocks; unit > 0; --unit) use(unit);
  }
  return counts;
}

std::int64_t sent_over_data_axis(const Configuration& configuration, const Architecture& architecture) {
  const parallel::GridShape grid = grid_shape(configuration);
  const std::int64_t ranks = configuration.parallel.data, last = grid.ranks() - 1;
  const std::vector<model::ParameterSpec> specs = parameter_specs(architecture);
  std::int64_t bytes = 4 * configuration.data.batch_tokens / ranks;  // losses
  bytes += 4 * model::AccumulatingSink::vector_elements(specs, grid, last);
  const bool two_planes = device::planned_backend(device_settings(configuration)) == kernels::Backend::cuda;
  const parallel::Shard shard = configuration.shard();
  const std::vector<std::int64_t> gathered = gatherings(configuration, specs);
  const std::int64_t reduced = shard == parallel::Shard::state ? 1 : micro_batches(configuration);
  for (const model::ParameterSpec& spec : specs) {
    if (!spec.is_matrix() || (spec.frozen && shard != parallel::Shard::full)) continue;
    const std::int64_t rows = model::row_parts(spec, grid, last).held.size();
    const kernels::StorageType storage = spec.storage.value_or(configuration.optimizer.state);
    const bool half = two_planes && storage == kernels::StorageType::fp32 &&
                      gathered_weights(configuration) == model::GatheredWeights::upper_plane;
    const std::int64_t weights = model::weight_bytes(storage, rows, spec.columns()) / (half ? 2 : 1);
    bytes += ((spec.frozen ? 0 : 4 * reduced * rows * spec.columns()) +
              (shard == parallel::Shard::full ? gathered[spec.unit] : 1) * weights) /
             ranks;
  }
  return (ranks - 1) * bytes;
}

}  // namespace

bool gathers_repeatedly(const Configuration& configuration) {
  return configuration.shard() == parallel::Shard::full && micro_batches(configuration) > 1;
}

std::int64_t bytes_sent(const Configuration& configuration, const Architecture& architecture) {
  return (configuration.parallel.tensor > 1 ? sent_over_tensor_axis(configuration, architecture) : 0) +
         (configuration.parallel.data > 1 ? sent_over_data_axis(configuration, architecture) : 0);
}

std::vector<GridPlan> grid_plans(const Configuration& configuration, const Architecture& architecture) {
  const std::int64_t ranks = configuration.parallel.data * configuration.parallel.tensor,
                     sequences = configuration.data.batch_tokens / configuration.data.sequence;
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  std::vector<GridPlan> plans;
  for (std::int64_t tensor = 1; tensor <= ranks; ++tensor) {
    Configuration other = configuration;
    other.parallel.tensor = tensor;
    other.parallel.data = ranks / tensor;
    if (ranks % tensor != 0 || other.parallel.data > sequences || !obstacle_to_tensor_axis(other, architecture).empty())
      continue;
    plans.push_back({.tensor = tensor,
                     .data = other.parallel.data,
                     .bytes_sent = bytes_sent(other, architecture),
                     .device_bytes = device_bytes(with_clipping_mode(other, architecture, grid_shape(other), backend),
                                                  architecture, grid_shape(other), backend)});
  }
  return plans;
}

std::string grids_text(const Configuration& configuration, const Architecture& architecture) {
  const std::vector<GridPlan> plans = grid_plans(configuration, architecture);
  if (plans.size() < 2) return {};
  const auto available = static_cast<std::int64_t>(configuration.device.memory * 1e9);
  const auto fits = [&](const GridPlan& one) { return available == 0 || one.device_bytes <= available; };
  const GridPlan* least = nullptr;
  for (const GridPlan& one : plans)
    if (fits(one) && (least == nullptr || one.bytes_sent < least->bytes_sent)) least = &one;
  std::string text = "  grids (tensor x data): sent per step and rank, memory\n";
  for (const GridPlan& one : plans) {
    text += fmt::format("    {:<8}{:>12}{:>12}", fmt::format("{} x {}", one.tensor, one.data),
                        format::binary_bytes_text(one.bytes_sent), format::binary_bytes_text(one.device_bytes));
    if (!fits(one)) text += "  does not fit";
    if (&one == least) text += available == 0 ? "  sends least" : "  sends least of those that fit";
    text += one.tensor == configuration.parallel.tensor ? "  (this run)\n" : "\n";
  }
  return text;
}

}  // namespace weft::language_model

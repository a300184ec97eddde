// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/grid_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/format.hpp"
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
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const parallel::Shard shard = configuration.shard();
  const std::vector<std::int64_t> gathered = gatherings(configuration, specs);
  const std::int64_t reduced = shard == parallel::Shard::state ? 1 : micro_batches(configuration);
  for (const model::ParameterSpec& spec : specs) {
    if (!spec.is_matrix() || (spec.frozen && shard != parallel::Shard::full)) continue;
    const std::int64_t rows = model::row_parts(spec, grid, last).held.size();
    const kernels::StorageType storage = spec.storage.value_or(configuration.optimizer.state);
    const bool half = backend == kernels::Backend::cuda && storage == kernels::StorageType::fp32 &&
                      gathered_weights(configuration) == model::GatheredWeights::upper_plane;
    std::int64_t weights = 0;
    if (shard != parallel::Shard::full)
      weights = model::weight_bytes(storage, rows, spec.columns()) / (half ? 2 : 1);
    else
      for (const model::Plane& plane :
           model::read_planes(spec, configuration.optimizer.state, backend, gathered_weights(configuration)))
        weights += gathered[spec.unit] * rows * plane.columns * kernels::bytes_of(plane.type);
    bytes += ((spec.frozen ? 0 : 4 * reduced * rows * spec.columns()) + weights) / ranks;
  }
  return (ranks - 1) * bytes;
}

/// True if a step gathers weights in several micro-batches, with memory for two blocks.
bool gathers_repeatedly(const Configuration& configuration) {
  return configuration.shard() == parallel::Shard::full && micro_batches(configuration) > 1;
}

/// Rates of H100 and H200: products as complete steps attain them (docs/language_performance.md), memory, NCCL over
/// NVLink, and a network of 400 Gbit/s per GPU.
constexpr double kProducts16 = 0.5 * 989e12, kProductsTf32 = 0.5 * 495e12, kProducts32 = 0.9 * 67e12;
constexpr double kMemoryRate = 3e12, kNodeRate = 300e9, kNetworkRate = 40e9;

double product_rate(const Configuration& configuration) {
  if (activation_type(configuration) != kernels::Scalar::fp32) return kProducts16;
  return configuration.precision == Precision::tf32 ? kProductsTf32 : kProducts32;
}

}  // namespace

std::int64_t bytes_sent(const Configuration& configuration, const Architecture& architecture) {
  return (configuration.parallel.tensor > 1 ? sent_over_tensor_axis(configuration, architecture) : 0) +
         (configuration.parallel.data > 1 ? sent_over_data_axis(configuration, architecture) : 0);
}

double expected_seconds(const Configuration& configuration, const Architecture& architecture, std::int64_t node_ranks) {
  const auto tensor = static_cast<double>(configuration.parallel.tensor), node = static_cast<double>(node_ranks);
  const double repeated = configuration.memory.recompute == Recompute::block ? 4.0 / 3 : 1;
  double seconds = repeated * flops_per_token(architecture, configuration.data.sequence) *
                   static_cast<double>(configuration.rank_tokens()) / tensor / product_rate(configuration);
  const std::int64_t gradients = 4 * model::trained_elements_of(parameter_specs(architecture));
  seconds += 2 * static_cast<double>((micro_batches(configuration) - 1) * gradients) / tensor / kMemoryRate;
  if (configuration.parallel.tensor > 1)
    seconds += static_cast<double>(sent_over_tensor_axis(configuration, architecture)) / kNodeRate;
  if (configuration.parallel.data == 1) return seconds;
  const auto sent = static_cast<double>(sent_over_data_axis(configuration, architecture));
  double exchange = sent / kNodeRate;
  // Each ring of the data axis leaves a node once, and a node has as many rings as a group has ranks.
  if (configuration.parallel.data * configuration.parallel.tensor > node_ranks)
    exchange = std::max(exchange, sent * tensor / (node * kNetworkRate));
  return std::max(seconds, exchange);
}

void GridPlan::apply_to(Configuration& configuration) const {
  configuration.parallel.tensor = tensor;
  configuration.parallel.data = data;
  configuration.parallel.shard = shard;
  configuration.parallel.gathered_blocks = gathered_blocks;
  configuration.memory.micro_tokens = micro_tokens;
}

GridPlan GridChoice::given(const Configuration& configuration) const {
  Configuration own = configuration;
  own.parallel.gathered_blocks = parallel::Settings().gathered_blocks;
  if (own.memory.micro_tokens == 0)
    own.memory.micro_tokens = largest_micro_tokens(own, limits, [&](std::int64_t micro_tokens) {
      Configuration with = own;
      with.memory.micro_tokens = micro_tokens;
      return plan_of(with);
    });
  Plan plan = plan_of(own);
  if (gathers_repeatedly(own) && limits.known()) {
    Configuration once = own;
    once.parallel.gathered_blocks = own.language_model.layers;
    if (Plan all = plan_of(once); limits.allow(all)) {
      own.parallel.gathered_blocks = once.parallel.gathered_blocks;
      plan = std::move(all);
    }
  }
  return {.tensor = own.parallel.tensor,
          .data = own.parallel.data,
          .shard = own.shard(),
          .micro_tokens = own.memory.micro_tokens,
          .gathered_blocks = own.parallel.gathered_blocks,
          .bytes_sent = bytes_sent(own, plan.architecture),
          .seconds = expected_seconds(own, plan.architecture, node_ranks),
          .fits = limits.allow(plan),
          .plan = std::move(plan)};
}

std::vector<GridPlan> GridChoice::all(const Configuration& configuration) const {
  const std::int64_t ranks = configuration.parallel.data * configuration.parallel.tensor,
                     sequences = configuration.data.batch_tokens / configuration.data.sequence;
  std::vector<GridPlan> plans;
  for (std::int64_t tensor = 1; tensor <= std::min(ranks, node_ranks); ++tensor) {
    if (ranks % tensor != 0 || node_ranks % tensor != 0 || ranks / tensor > sequences) continue;
    for (const auto& [name, shard] : parallel::kShards) {
      Configuration other = configuration;
      other.parallel.tensor = tensor;
      other.parallel.data = ranks / tensor;
      other.parallel.shard = shard;
      if ((ranks == tensor && shard != parallel::Shard::state) || !obstacle_to_grid(other, architecture).empty())
        continue;
      plans.push_back(given(other));
    }
  }
  return plans;
}

const GridPlan& GridChoice::best(const std::vector<GridPlan>& plans) {
  return *std::min_element(plans.begin(), plans.end(), [](const GridPlan& a, const GridPlan& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.seconds < b.seconds : a.plan.device_total() < b.plan.device_total();
  });
}

std::string grids_text(const std::vector<GridPlan>& plans, const Configuration& configuration) {
  if (plans.size() < 2) return {};
  const GridPlan& best = GridChoice::best(plans);
  std::string text =
      "  grids (tensor x data, parallel.shard): sent per step and rank, memory, expected time of a step on H100 or "
      "H200\n";
  for (const GridPlan& one : plans) {
    text += fmt::format("    {:<10}{:<11}{:>12}{:>12}{:>12}", fmt::format("{} x {}", one.tensor, one.data),
                        parallel::kShards[static_cast<std::size_t>(one.shard)].first,
                        format::binary_bytes_text(one.bytes_sent), format::binary_bytes_text(one.plan.device_total()),
                        fmt::format("{:.3g} s", one.seconds));
    if (!one.fits) text += "  does not fit";
    if (&one == &best && one.fits) text += "  shortest";
    text += one.tensor == configuration.parallel.tensor && one.shard == configuration.shard() ? "  (this run)\n" : "\n";
  }
  return text;
}

}  // namespace weft::language_model

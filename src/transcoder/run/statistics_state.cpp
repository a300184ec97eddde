// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/statistics_state.hpp"

#include <string>

#include "base/error.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

void add_statistics(checkpoint::Registry& registry, dataset::Statistics& statistics, int world_rank) {
  const auto add = [&](const std::string& name, kernels::Scalar type, std::int64_t size, void* data) {
    registry.add({.name = "statistics/" + name,
                  .type = type,
                  .shape = {size},
                  .held = {0, size},
                  .owned = {0, world_rank == 0 ? size : 0},
                  .data = data,
                  .on_device = false});
  };
  add("rows", kernels::Scalar::i64, 1, &statistics.n_rows);
  const auto add_side = [&](const std::string& side, dataset::SideStatistics& values) {
    for (auto& [name, vector] : {std::pair<const char*, std::vector<double>&>{"_mean", values.mean},
                                 {"_standard_deviation", values.standard_deviation},
                                 {"_mean_norm", values.mean_norm}})
      add(side + name, kernels::Scalar::fp64, static_cast<std::int64_t>(vector.size()), vector.data());
  };
  add_side("inputs", statistics.inputs);
  add_side("targets", statistics.targets);
}

dataset::Statistics load_statistics(const parallel::World& world, const checkpoint::Found& found, std::int64_t n_layers,
                                    std::int64_t d_model, const std::string& data,
                                    const kernels::Execution& execution) {
  if (const auto stored = stored_model(found.manifest.tensors);
      stored && (stored->shape.n_layers != n_layers || stored->shape.d_model != d_model))
    throw collective_error(ExitCode::data,
                           "{} has {} layer{} of width {}, {} is of a transcoder of {} of width {} (they belong to "
                           "different models); give "
                           "the activations of its model",
                           data, n_layers, n_layers == 1 ? "" : "s", d_model, found.path.string(),
                           stored->shape.n_layers, stored->shape.d_model);
  dataset::Statistics statistics;
  for (dataset::SideStatistics* side : {&statistics.inputs, &statistics.targets}) {
    side->mean.resize(static_cast<std::size_t>(n_layers * d_model));
    side->standard_deviation.resize(static_cast<std::size_t>(n_layers * d_model));
    side->mean_norm.resize(static_cast<std::size_t>(n_layers));
  }
  checkpoint::Registry registry;
  add_statistics(registry, statistics, world.rank());
  checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);
  return statistics;
}

}  // namespace weft::transcoder

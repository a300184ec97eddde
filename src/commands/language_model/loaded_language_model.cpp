// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/loaded_language_model.hpp"

#include "language_model/run/memory_plan.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "parallel/affinity.hpp"

namespace weft::commands {

using namespace language_model;

namespace {

std::int64_t in_whole_groups(std::int64_t tensor, const parallel::World& world) {
  require_groups(tensor, world.size());
  return tensor;
}

}  // namespace

ModelRanks::ModelRanks(std::int64_t tensor, const parallel::World& world)
    : copy(world.all().split(static_cast<int>(world.rank() / in_whole_groups(tensor, world)), world.rank())),
      peers(world.all().split(static_cast<int>(world.rank() % tensor), world.rank())),
      grid(copy, one_copy(tensor)) {}

std::optional<model::TensorAxis> tensor_axis(const TransformerSettings& settings, const ModelRanks& ranks,
                                             const kernels::Execution& execution, model::StepArena& arena, bool overlap,
                                             std::int64_t gathered) {
  if (ranks.copy.size() == 1) return std::nullopt;
  return std::optional<model::TensorAxis>(std::in_place, ranks.grid, execution,
                                          tensor_buffers(settings, ranks.grid.shape(), arena, gathered), overlap);
}

ForwardModel::ForwardModel(const OpenedModel& opened, const parallel::World& world, const kernels::Execution& execution)
    : ranks(opened.configuration().parallel.tensor, world),
      model(opened.architecture, opened.configuration().optimizer.state, ranks.grid.shape(), ranks.copy.rank(),
            execution, model::Moments::none) {
  opened.load(model, world, execution);
}

LoadedLanguageModel::LoadedLanguageModel(const Request& request, const parallel::World& world)
    : opened(request, world),
      runtime(device_settings(configuration()), world.node_rank(),
              parallel::bind_to_cpus(world, configuration().device)),
      tokenizer(opened.tokenizer(world, runtime.execution())),
      part(opened, world, runtime.execution()) {
  if (tokenizer && world.is_root()) note_special_tokens(*tokenizer);
}

ForwardOnly::ForwardOnly(const Configuration& configuration, const ForwardModel& part, std::int64_t rows, bool overlap)
    : settings(forward_settings(configuration, part.model.architecture(), rows, part.ranks.grid.shape(),
                                part.ranks.copy.rank())),
      arena(part.model.execution(), part.ranks.grid),
      tensor(tensor_axis(settings, part.ranks, part.model.execution(), arena, overlap)),
      transformer(part.model, settings, timers, arena, tensor ? &*tensor : nullptr),
      staging(rows, configuration.data.document_mask, part.model.execution(), arena) {
  transformer.prepare_weights();
}

}  // namespace weft::commands

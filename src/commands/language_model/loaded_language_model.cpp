// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/loaded_language_model.hpp"

#include "language_model/run/memory_plan.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "parallel/affinity.hpp"

namespace weft::commands {

using namespace language_model;

WholeModel::WholeModel(const OpenedModel& opened, const parallel::World& world, const kernels::Execution& execution)
    : self(world.all().split(world.rank(), 0)),
      grid(self, single_process()),
      model(opened.architecture, opened.configuration().optimizer.state, grid.shape(), 0, execution,
            model::Moments::none) {
  opened.load(model, world, execution);
}

LoadedLanguageModel::LoadedLanguageModel(const Request& request, const parallel::World& world)
    : opened(request, world),
      runtime(device_settings(configuration()), world.node_rank(),
              parallel::bind_to_cpus(world, configuration().device)),
      tokenizer(opened.tokenizer(world, runtime.execution())),
      whole(opened, world, runtime.execution()) {
  if (tokenizer && world.is_root()) note_special_tokens(*tokenizer);
}

ForwardOnly::ForwardOnly(const Configuration& configuration, const WholeModel& whole, std::int64_t rows)
    : settings(forward_settings(configuration, whole.model.architecture(), rows)),
      arena(whole.model.execution(), whole.grid),
      transformer(whole.model, settings, timers, arena),
      staging(rows, configuration.data.document_mask, whole.model.execution(), arena) {
  transformer.prepare_weights();
}

}  // namespace weft::commands

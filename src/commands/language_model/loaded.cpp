// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/loaded.hpp"

#include "language_model/plan.hpp"
#include "parallel/affinity.hpp"

namespace weft::commands {
namespace {

using namespace language_model;

TransformerSettings forward_settings(const LoadedLanguageModel& loaded, std::int64_t rows) {
  TransformerSettings settings = transformer_settings(loaded.configuration(), loaded.architecture());
  settings.gradients = false;
  settings.rows = rows;
  return settings;
}

}  // namespace

LoadedLanguageModel::LoadedLanguageModel(const Request& request, const parallel::World& world)
    : opened(request, world),
      runtime(device_settings(configuration()), world.node_rank(),
              parallel::bind_to_cpus(world, configuration().device)),
      tokenizer(opened.tokenizer(world, runtime.execution())),
      self(world.all().split(world.rank(), 0)),
      grid(self, single_process()),
      model(architecture(), configuration().optimizer.state, grid.shape(), 0, runtime.execution(),
            training::Moments::none) {
  opened.load(model, world, runtime.execution());
}

ForwardOnly::ForwardOnly(const LoadedLanguageModel& loaded, std::int64_t rows)
    : settings(forward_settings(loaded, rows)),
      arena(loaded.execution(), loaded.grid),
      transformer(loaded.model, settings, timers, arena),
      staging(rows, loaded.configuration().data.document_mask, loaded.execution(), arena) {
  transformer.prepare_weights();
}

}  // namespace weft::commands

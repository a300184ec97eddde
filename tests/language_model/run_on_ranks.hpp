// SPDX-License-Identifier: Apache-2.0
//
// A training run of a language model whose ranks have the batches that one rank would have.
#pragma once

#include "language_model/run/memory_plan.hpp"
#include "language_model/step/language_trainer.hpp"
#include "tests/shared_grid.hpp"
#include "tests/test.hpp"

namespace weft::language_model {

inline constexpr std::int64_t kVocabulary = 43;  // divided unevenly
inline constexpr std::int32_t kDocument = 5;     // rows

struct Run {
  /// On the ranks of `world`, in groups of `tensor`.
  Run(const Configuration& given, const parallel::Communicator& world, std::int64_t tensor = 1)
      : settings(on(given, world.size(), tensor)),
        shared(testing::shared_grid(world, grid_shape(settings))),
        trainer(settings, {settings.language_model, kVocabulary, settings.data.sequence, settings.lora}, grid,
                {device::planned_backend(device_settings(settings)), testing::execution().stream}) {
    trainer.initialise();
  }
  static Configuration on(Configuration settings, std::int64_t n_ranks, std::int64_t tensor) {
    settings.parallel.tensor = tensor;
    use_ranks(settings, n_ranks);
    return settings;
  }
  void step() {
    const std::int64_t first = trainer.first_sequence();
    dataset::TokenBatch batch = trainer.next_batch();
    batch.counted = 0;
    for (std::int64_t row = 0; row < batch.rows(); ++row) {
      const auto at = static_cast<std::size_t>(row);
      const std::int64_t place = first * batch.length + row, token = place * place + 7 * trainer.steps_done();
      batch.ids[at] = static_cast<std::uint32_t>(token % kVocabulary);
      // Ranks count different numbers of targets.
      const bool counts = place % 5 != 2 && place > 20;
      batch.targets[at] = counts ? static_cast<std::int32_t>((token + place) % kVocabulary) : kernels::kIgnored;
      const auto in_sequence = static_cast<std::int32_t>(row % batch.length);
      // With the document mask every sequence holds two documents.
      const std::int32_t document = batch.first_key.empty() || in_sequence < kDocument ? 0 : kDocument;
      if (!batch.first_key.empty()) batch.first_key[at] = document;
      batch.positions[at] = in_sequence - document;
      batch.counted += counts;
    }
    trainer.step(batch);
  }
  const Configuration settings;
  const std::shared_ptr<const parallel::Grid> shared;
  const parallel::Grid& grid = *shared;
  Trainer trainer;
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/planned_bytes.hpp"

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/step/language_trainer.hpp"

namespace weft::language_model {

OtherBytes::OtherBytes(const Configuration& configuration, const Architecture& architecture, kernels::Backend backend)
    : positions(4 * rotary_elements(architecture)) {
  if (configuration.sample.tokens == 0) return;
  model::StepArena arena(backend);
  const parallel::GridShape grid = grid_shape(configuration);
  const Generator::Buffers generator(sample_settings(configuration, architecture, grid, grid.ranks() - 1), arena);
  samples = arena.device_bytes();
  samples_on_host = arena.host_bytes();
}

std::int64_t device_bytes(const Configuration& configuration, const Architecture& architecture,
                          const parallel::GridShape& grid, kernels::Backend backend) {
  return model::largest_state_bytes(parameter_specs(architecture), grid, configuration.optimizer.state, backend,
                                    configuration.moments(), stored_weights(configuration))
             .total() +
         OtherBytes(configuration, architecture, backend).on_device() +
         measure_step(configuration, architecture, grid, backend).device_bytes();
}

}  // namespace weft::language_model

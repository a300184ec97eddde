// SPDX-License-Identifier: Apache-2.0
//
// weft synth INPUT: activations with planted cross-layer features, and the ground truth.
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "dataset/activations/synthetic.hpp"
#include "device/runtime.hpp"

namespace weft::commands {

int synth(const Request& request, const parallel::World& world) {
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input(request, schema, world);
  // One process writes: the files are the same whatever the number of ranks.
  world.on_root([&]() -> std::string {
    dataset::write_synthetic(input.synthetic, device::host_threads(input.configuration.device, 1));
    return {};
  });
  log::info("wrote {}/train, {}/validation and ground_truth.h5: {} layers, d_model {}, {} planted features per layer",
            input.synthetic.output, input.synthetic.output, input.synthetic.layers, input.synthetic.d_model,
            input.synthetic.features);
  return 0;
}

}  // namespace weft::commands

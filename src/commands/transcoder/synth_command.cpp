// SPDX-License-Identifier: Apache-2.0
//
// weft synth INPUT: activations with planted cross-layer features, and the ground truth.
#include <optional>

#include "base/log.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "run/profile.hpp"

namespace weft::commands {

static int run_synth(const Request& request, const parallel::World& world) {
  bench::TranscoderInput input;
  read_input(request, bench::dataset_keys(input), world);
  if (request.profile && world.size() > 1)
    throw collective_error(ExitCode::usage, "synth --profile needs one process (only rank 0 computes); use one");
  std::optional<device::Runtime> runtime;
  if (request.profile) {
    device::Settings device = transcoder::device_settings(input.configuration);
    device.backend = "portable";
    runtime.emplace(device, world.node_rank(), world.node_size());
  }
  std::optional<run::Profile> profile;
  if (runtime) profile.emplace(true, world, *runtime);
  // One process writes: the files are the same whatever the number of ranks.
  world.on_root(
      [&] { dataset::write_synthetic(input.synthetic, device::host_threads(input.configuration.device, 1)); });
  const dataset::SyntheticSettings& made = input.synthetic;
  print_written(
      request,
      fmt::format(
          "wrote {}/train, {}/validation and ground_truth.h5: {} layers, d_model {}, {} planted features per layer",
          made.output, made.output, made.layers, made.d_model, made.features),
      {{"output", made.output}, {"layers", made.layers}, {"d_model", made.d_model}, {"features", made.features}});
  log::info("next: weft train {}", request.subject);
  if (profile) profile->conclude(made.output, {});
  return 0;
}

extern const Command synth_command = with_options(
    {"synth", "INPUT", "write an activation dataset with planted features",
     "Writes activations with planted cross-layer features, and the ground truth, as table [synthetic] of the input "
     "describes them.",
     Needs::nothing, false, [](std::string_view) { return keys_of(bench::dataset_keys); }},
    run_synth, [](Options& options) {
      options.example("weft synth inputs/quickstart.toml --set synthetic.output=runs/data");
      options.set().templates().dry_run();
      options.output("receives train/, validation/ and ground_truth.h5 (synthetic.output)", "synthetic.output")
          .profile();
    });

}  // namespace weft::commands

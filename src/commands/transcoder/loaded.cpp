// SPDX-License-Identifier: Apache-2.0
#include "commands/transcoder/loaded.hpp"

#include "parallel/affinity.hpp"
#include "parallel/nccl.hpp"

namespace weft::commands {
namespace {

checkpoint::Found transcoder_at(const std::string& path, const parallel::World& world) {
  checkpoint::Found found = open_checkpoint(path, world);
  require_kind(found, "encoder_0/weight", "name that of a transcoder; weft lm evaluate is for language models");
  return found;
}

Input input_of(const checkpoint::Found& found, const Request& request, const parallel::World& world) {
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input_of(found, request, schema, world, request.data.empty() ? "" : "data.stored_as");
  return input;
}

std::string data_of(const Input& input, const Request& request, const parallel::World& world) {
  const std::string path = request.data.empty() ? input.configuration.data.validation : request.data;
  if (path.empty() && !input.configuration.data.model.empty())
    throw collective_error(ExitCode::usage,
                           "no data to use (the run computed its activations with data.model = \"{0}\" and has no "
                           "data.validation); record some with weft lm harvest {0} --output DIR, then give --data DIR",
                           input.configuration.data.model);
  if (path.empty())
    throw collective_error(ExitCode::usage, "no data to use (the run has no data.validation); give --data DIR");
  require_directory(world, path, request.data.empty() ? "data.validation" : "--data");
  return path;
}

device::Runtime start_device(const transcoder::Configuration& configuration, const parallel::World& world) {
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  return device::Runtime(transcoder::device_settings(configuration), world.node_rank(),
                         parallel::bind_to_cpus(world, configuration.device));
}

}  // namespace

LoadedTranscoder::LoadedTranscoder(const Request& request, const parallel::World& world)
    : found(transcoder_at(request.subject, world)),
      input(input_of(found, request, world)),
      data(data_of(input, request, world)),
      description(dataset::describe(world, data, configuration().data)),
      runtime(start_device(configuration(), world)),
      grid(world, parallel::data_by_feature(1, world.size())),
      statistics(transcoder::load_statistics(world, found, description.n_layers, description.d_model, data,
                                             runtime.execution())),
      normalisation(dataset::normalisation(statistics, description, configuration().data.normalise), statistics,
                    runtime.execution()),
      model(transcoder::shape_of(configuration().transcoder, description.n_layers, description.d_model),
            configuration().optimizer.state, grid, runtime.execution(), transcoder::Moments::none),
      arena(runtime.execution(), grid),
      forward(configuration(), model, normalisation, grid, runtime.execution(), timers, batch_tokens(), arena) {
  checkpoint::Registry registry;
  model.add_to(registry);
  checkpoint::load(world.all(), found, registry, runtime.execution(), checkpoint::Load::part);
}

}  // namespace weft::commands

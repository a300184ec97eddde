// SPDX-License-Identifier: Apache-2.0
#include "commands/transcoder/loaded_transcoder.hpp"

#include <fmt/ranges.h>

#include <filesystem>

#include "dataset/activations/describe.hpp"
#include "parallel/affinity.hpp"
#include "parallel/nccl.hpp"

namespace weft::commands {
namespace {

checkpoint::Found transcoder_at(const std::string& path, const parallel::World& world) {
  checkpoint::Found found = open_checkpoint(path, world);
  require_kind(found, "encoder_0/weight", "name that of a transcoder; weft lm evaluate is for language models");
  return found;
}

bench::TranscoderInput input_of(const checkpoint::Found& found, const Request& request, const std::string& data,
                                const parallel::World& world) {
  bench::TranscoderInput input;
  read_input_of(found, request, bench::trained_keys(input), world, data.empty() ? "" : "data.stored_as");
  return input;
}

/// `run`: where activations of a model may be recorded, and are then found.
std::string data_of(const bench::TranscoderInput& input, const std::string& data, const std::filesystem::path& run,
                    const parallel::World& world) {
  std::string path = data.empty() ? input.configuration.data.validation : data;
  if (const dataset::Settings& used = input.configuration.data; path.empty() && !used.model.empty()) {
    path = world.on_root([&] {
      const std::filesystem::path recorded = run / "validation";
      return std::filesystem::is_directory(recorded) ? recorded.string() : std::string();
    });
    if (!path.empty()) return path;
    const std::vector<std::string>& text = used.validation_text.empty() ? used.text : used.validation_text;
    const bool held_out = text == std::vector<std::string>{dataset::kHeldOut};
    throw collective_error(ExitCode::usage,
                           "no data to use (the run computed its activations with data.model = \"{0}\" and has no "
                           "data.validation); record some, once: weft lm harvest {0}{1}{2} --tokens 65536 "
                           "--output {3}/validation",
                           used.model,
                           held_out       ? " --split validation"
                           : text.empty() ? ""
                                          : " --text ",
                           held_out ? "" : fmt::format("{}", fmt::join(text, " --text ")), run.string());
  }
  if (path.empty())
    throw collective_error(ExitCode::usage, "no data to use (the run has no data.validation); give --data DIR");
  require_directory(world, path, data.empty() ? "data.validation" : "--data");
  return path;
}

device::Runtime start_device(const transcoder::Configuration& configuration, const parallel::World& world) {
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  return device::Runtime(transcoder::device_settings(configuration), world.node_rank(),
                         parallel::bind_to_cpus(world, configuration.device));
}

}  // namespace

Options& data_option(Options& options, std::string& data) {
  return options.add("--data", data, "DIR", "activations to use (default: the run's validation data)");
}

LoadedTranscoder::LoadedTranscoder(const Request& request, const std::string& data_option, const parallel::World& world)
    : found(transcoder_at(request.subject, world)),
      input(input_of(found, request, data_option, world)),
      data(data_of(input, data_option, found.path.parent_path().parent_path(), world)),
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

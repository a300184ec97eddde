// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/initial_weights.hpp"

#include <set>
#include <string>
#include <vector>

#include "input/read.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::transcoder {

void require_initial(const Configuration& configuration, const checkpoint::Found& initial, std::int64_t n_layers,
                     std::int64_t d_model) {
  const std::string& path = configuration.transcoder.initial;
  Configuration same = configuration;
  const input::Schema keys = schema(same);
  const std::vector<input::Change> changes =
      input::changed_keys(keys, initial.manifest.input, (initial.path / checkpoint::kManifestName).string());
  const Shape shape = shape_of(configuration.transcoder, n_layers, d_model);
  const std::string difference = model::first_difference(
      initial.manifest.tensors,
      model::tensors_of(parameter_specs(shape), configuration.optimizer.state, model::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::usage,
                           "transcoder.initial = \"{}\": {} (weights are taken as they are stored, for a model of {}); "
                           "give its keys (weft inspect prints them), optimizer.state included",
                           path, difference, to_text(shape));
  for (const input::Change& change : changes)
    if (change.path == "data.normalise")
      throw collective_error(ExitCode::usage,
                             "transcoder.initial = \"{}\": its activations were normalised with data.normalise = {}, "
                             "not {} (the weights belong to them); take that",
                             path, change.before, change.after);
}

void load_initial(Trainer& trainer, const checkpoint::Found& initial, const parallel::World& world,
                  const kernels::Execution& execution) {
  const model::Parameters& parameters = trainer.model().parameters();
  std::set<std::string> names;  // of weights, without moments and clocks
  for (const model::ParameterSpec& spec : parameters.specs()) names.insert(spec.name);
  checkpoint::Registry all, weights;
  parameters.add_to(all);
  for (const checkpoint::Tensor& tensor : all.tensors())
    if (names.contains(tensor.name)) weights.add(tensor);
  checkpoint::load(world.all(), initial, weights, execution, checkpoint::Load::part);
  trainer.resume_at(0);
}

}  // namespace weft::transcoder

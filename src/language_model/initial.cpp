// SPDX-License-Identifier: Apache-2.0
#include "language_model/initial.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "input/read.hpp"
#include "language_model/adapters.hpp"
#include "language_model/training_run.hpp"

namespace weft::language_model {
namespace {

checkpoint::Found open_initial(const std::string& path, const parallel::World& world) {
  const bool run = !world.on_root([&] { return std::string(checkpoint::is_run(path) ? "run" : ""); }).empty();
  if (!run) return checkpoint::open(world.all(), path, checkpoint::Verify::full);
  auto found = checkpoint::find(world.all(), std::filesystem::path(path) / "checkpoints", "auto",
                                checkpoint::Verify::full, checkpoint::Leftovers::keep);
  if (!found)
    throw collective_error(
        ExitCode::io, "language_model.initial = \"{}\": no checkpoint yet (the run has not written one); give another",
        path);
  return *std::move(found);
}

}  // namespace

InitialModel::InitialModel(const Configuration& configuration, const parallel::World& world) {
  if (is_huggingface_directory(configuration.initial)) {
    directory_.emplace(configuration.initial);
    vocabulary_ = directory_->config().vocabulary;
  } else {
    found_ = open_initial(configuration.initial, world);
    const auto is_embedding = [](const checkpoint::TensorEntry& tensor) { return tensor.name == "embedding/tokens"; };
    if (std::none_of(found_->manifest.tensors.begin(), found_->manifest.tensors.end(), is_embedding))
      throw collective_error(ExitCode::usage,
                             "language_model.initial = \"{}\": belongs to another kind of model (it has no tensor "
                             "\"embedding/tokens\"); give a language model",
                             configuration.initial);
    vocabulary_ = stored_architecture(configuration, found_->manifest.tensors).vocabulary;
    for (const checkpoint::TensorEntry& tensor : found_->manifest.tensors)
      if (tensor.name.ends_with("/lora_a"))
        throw collective_error(ExitCode::usage,
                               "language_model.initial = \"{}\": has adapters (training begins with whole weights); "
                               "merge them with weft lm merge",
                               configuration.initial);
  }
  require_settings(configuration);
}

void InitialModel::require_settings(const Configuration& configuration) const {
  if (directory_) return directory_->require(configuration.language_model);
  Configuration same = configuration;
  const input::Schema keys = schema(same);
  std::string refused;
  for (const input::Change& change : input::changed_keys(keys, found_->manifest.input, checkpoint::kManifestName))
    if (change.path.starts_with("language_model.") && change.resume == input::Resume::fixed &&
        change.path != "language_model.initial" && change.path != "language_model.preset")
      refused += fmt::format("\n  {} is {}, not {}", change.path, change.before, change.after);
  if (!refused.empty())
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": another model than that of [language_model] (the weights "
                           "belong to it); correct these keys:{}",
                           configuration.initial, refused);
}

bool InitialModel::is_private() const {
  if (!found_) return false;
  Configuration any;
  const input::Schema keys = schema(any);
  const auto value = [&](const char* key) {
    return input::value_in(keys, key, found_->manifest.input, checkpoint::kManifestName);
  };
  return std::get<bool>(value("privacy.enabled")) && std::get<std::string>(value("privacy.noise_key")) == "system";
}

std::optional<Tokenizer> InitialModel::tokenizer(const parallel::World& world,
                                                 const kernels::Execution& execution) const {
  return found_ ? stored_tokenizer(*found_, world, execution) : directory_->tokenizer();
}

void InitialModel::load(const training::Parameters& parameters, const parallel::World& world,
                        const kernels::Execution& execution) const {
  if (directory_) return directory_->load(parameters, execution);
  // Every parameter has one tensor or more; those of the weights are what a model without moments has. Adapters keep
  // their first values.
  checkpoint::Registry all, weights;
  parameters.add_to(all);
  for (const checkpoint::Tensor& tensor : all.tensors()) {
    const std::string_view name = tensor.name;
    const bool weight =
        std::any_of(parameters.specs().begin(), parameters.specs().end(),
                    [&](const training::ParameterSpec& spec) { return name == spec.name && !is_adapter(spec); });
    if (weight) weights.add(tensor);
  }
  checkpoint::load(world.all(), *found_, weights, execution, checkpoint::Load::part);
}

}  // namespace weft::language_model

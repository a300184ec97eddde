// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/initial_model.hpp"

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "input/read.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/huggingface/peft.hpp"
#include "language_model/run/stored_tokenizer.hpp"
#include "language_model/step/adapters.hpp"
#include "language_model/step/model_weights.hpp"

namespace weft::language_model {
namespace {

checkpoint::Found open_checkpoint(const std::string& path, const parallel::World& world) {
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

/// True if frozen weights are stored in another way than those of a model that is trained as a whole.
bool converts_weights(const Architecture& architecture) {
  return architecture.lora.rank > 0 && architecture.lora.base != LoraBase::stored;
}

/// A storage type whose weights are those of the checkpoint.
kernels::StorageType stored_type(const checkpoint::Found& found) {
  const auto tensor = std::find_if(found.manifest.tensors.begin(), found.manifest.tensors.end(),
                                   [](const auto& each) { return each.name == "embedding/tokens"; });
  return tensor->type == kernels::Scalar::fp32 ? kernels::StorageType::fp32 : kernels::StorageType::bf16;
}

/// The weights of a matrix as a checkpoint of this type has them. Reading rounds or packs them.
checkpoint::Tensor converted_tensor(const model::Parameters& parameters, std::size_t parameter,
                                    kernels::StorageType type, const kernels::Execution& execution) {
  const model::ParameterSpec& spec = parameters.specs()[parameter];
  const bool wide = type == kernels::StorageType::fp32;
  const kernels::ParameterRows rows = parameters.stored_matrix(parameter);
  checkpoint::Tensor tensor;
  tensor.name = spec.name;
  tensor.type = wide ? kernels::Scalar::fp32 : kernels::Scalar::bf16;
  tensor.shape = spec.stored_shape();
  tensor.held = parameters.stored(parameter);
  tensor.gather = [](parallel::Range, void*) {
    throw error(ExitCode::internal, "converted weights are read, not written");
  };
  tensor.scatter = [=](parallel::Range range, const void* packed) {
    const std::int64_t elements = range.size() * rows.columns;
    std::vector<float> widened(static_cast<std::size_t>(wide ? 0 : elements));
    for (std::size_t i = 0; i < widened.size(); ++i) widened[i] = static_cast<const kernels::bf16*>(packed)[i];
    const device::Buffer<float> staged(elements);
    device::copy(execution, staged.data(), wide ? packed : widened.data(), staged.bytes(),
                 device::Direction::to_device);
    kernels::weights_from_float(execution, rows, range.begin - rows.first_row,
                                staged.matrix(range.size(), rows.columns));
    kernels::fence(execution);
  };
  return tensor;
}

}  // namespace

std::string table_of_initial(const Configuration& configuration) {
  if (configuration.initial.empty() || !is_huggingface_directory(configuration.initial)) return {};
  return table_of(read_config_of(configuration.initial).model);
}

InitialModel::InitialModel(const Configuration& configuration, const parallel::World& world) {
  const bool directory =
      !world.on_root([&] { return std::string(is_huggingface_directory(configuration.initial) ? "directory" : ""); })
           .empty();
  if (directory) {
    parallel::on_all(world.all(), [&] { directory_.emplace(configuration.initial); });
    vocabulary_ = directory_->config().vocabulary;
    context_ = directory_->config().positions;
    family_ = directory_->config().family->name;
    if (is_peft_directory(configuration.initial) && configuration.lora.initial.empty())
      throw collective_error(
          ExitCode::usage,
          "language_model.initial = \"{}\": has adapters in addition to its weights (adapter_config.json); "
          "name them as lora.initial, or remove them",
          configuration.initial);
  } else {
    found_ = open_checkpoint(configuration.initial, world);
    const auto is_embedding = [](const checkpoint::TensorEntry& tensor) { return tensor.name == "embedding/tokens"; };
    if (std::none_of(found_->manifest.tensors.begin(), found_->manifest.tensors.end(), is_embedding))
      throw collective_error(ExitCode::usage,
                             "language_model.initial = \"{}\": belongs to another kind of model (it has no tensor "
                             "\"embedding/tokens\"); give a language model",
                             configuration.initial);
    Configuration own;
    const input::Schema keys = schema(own);
    own.data.sequence = std::get<std::int64_t>(
        input::value_in(keys, "data.sequence", found_->manifest.input, checkpoint::kManifestName));
    const Architecture stored = stored_architecture(own, found_->manifest);
    vocabulary_ = stored.vocabulary;
    context_ = stored.longest_text();
    family_ = stored.family;
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
        change.path != "language_model.initial" && change.path != "language_model.preset" &&
        change.path != "language_model.train")
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

void InitialModel::require_weights(const Configuration& configuration, const Architecture& architecture) const {
  if (architecture.model.position == Position::learned && configuration.data.sequence > context_)
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": has {} learned positions, fewer than data.sequence = {}; "
                           "take shorter sequences",
                           configuration.initial, context_, configuration.data.sequence);
  if (!found_) return;
  const bool converts = converts_weights(architecture);
  const std::string difference = model::first_difference(
      found_->manifest.tensors,
      model::tensors_of(parameter_specs(base_of(architecture)),
                        converts ? stored_type(*found_) : configuration.optimizer.state, model::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::usage, "language_model.initial = \"{}\": {}{}", configuration.initial, difference,
                           converts ? "; was it written by another program?"
                                    : " (weights are taken as they are stored); take its optimizer.state");
}

void InitialModel::load(const model::Parameters& parameters, const parallel::World& world,
                        const kernels::Execution& execution) const {
  if (directory_) return directory_->load(parameters, execution);
  // Every parameter has one tensor or more; those of the weights are what a model without moments has. Adapters keep
  // their first values.
  checkpoint::Registry all, weights;
  parameters.add_to(all);
  std::set<std::string_view> converted;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const model::ParameterSpec& spec = parameters.specs()[i];
    if (!spec.is_matrix() || !spec.frozen || !spec.storage) continue;
    weights.add(converted_tensor(parameters, i, stored_type(*found_), execution));
    converted.insert(spec.name);
  }
  for (const checkpoint::Tensor& tensor : all.tensors()) {
    if (converted.contains(tensor.name)) continue;
    const std::string_view name = tensor.name;
    const bool weight =
        std::any_of(parameters.specs().begin(), parameters.specs().end(),
                    [&](const model::ParameterSpec& spec) { return name == spec.name && !is_adapter(spec); });
    if (weight) weights.add(tensor);
  }
  checkpoint::load(world.all(), *found_, weights, execution, checkpoint::Load::part);
}

std::optional<InitialModel> open_initial(const Configuration& configuration, const parallel::World& world) {
  if (configuration.initial.empty()) return std::nullopt;
  return std::optional<InitialModel>(std::in_place, configuration, world);
}

namespace {

/// True if every id of `data` means the same bytes in `model`.
bool same_ids(const Tokenizer& data, const Tokenizer& model) {
  if (data.text() == model.text()) return true;
  if (data.vocabulary_size() > model.vocabulary_size()) return false;
  for (std::int64_t id = 0; id < data.vocabulary_size(); ++id) {
    const std::uint32_t token[] = {static_cast<std::uint32_t>(id)};
    if (data.detokenise(token, true) != model.detokenise(token, true)) return false;
  }
  // Symbols that stand for no text.
  constexpr const char* kSymbols[] = {"PAD", "UNK", "BOS", "EOS"};
  return std::all_of(std::begin(kSymbols), std::end(kSymbols), [&](const char* symbol) {
    return data.special(symbol) < 0 || data.special(symbol) == model.special(symbol);
  });
}

}  // namespace

Corpus load_corpus(const Configuration& configuration, const std::optional<InitialModel>& initial,
                   const parallel::World& world) {
  const std::string owner_field = configuration.privacy.enabled ? configuration.privacy.owner_field : "";
  if (!initial) return load_corpus(configuration.data, world, std::nullopt, owner_field);
  const dataset::TokenSettings& data = configuration.data;
  std::optional<Tokenizer> tokenizer;
  try {
    tokenizer = initial->tokenizer(world, kernels::Execution{});
  } catch (const Error& unreadable) {
    if (data.tokens.empty() && !dataset::holds_tokens(data.train)) throw;  // the text needs it
    if (world.is_root())
      log::warning("language_model.initial = \"{}\": its tokeniser cannot be compared with that of the data ({})",
                   configuration.initial, unreadable.what());
  }
  Corpus corpus = load_corpus(data, world, tokenizer, owner_field);
  if (tokenizer && corpus.tokenizer && !same_ids(*corpus.tokenizer, *tokenizer))
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": has another tokeniser than {} (the ids would mean other "
                           "tokens); {}",
                           configuration.initial,
                           data.tokens.empty() ? corpus.train.name() : fmt::format("data.tokens = \"{}\"", data.tokens),
                           data.tokens.empty() && data.special.empty()
                               ? "tokenise the data with that of the model"
                               : "leave data.tokens and data.special out: that of the model is then taken");
  if (!tokenizer && data.tokens.empty() && corpus.tokenizer && corpus.train.n_files() == 0)
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": has no tokeniser, and {} is text (which ids its tokens "
                           "have is not known); name the tokeniser of the model as data.tokens",
                           configuration.initial, data.train);
  return corpus;
}

}  // namespace weft::language_model

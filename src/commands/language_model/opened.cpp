// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/opened.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "input/strings.hpp"
#include "language_model/huggingface/peft.hpp"
#include "language_model/run/stored_tokenizer.hpp"
#include "storage/digest.hpp"

namespace weft::commands {
namespace {

/// Sequences without --set data.sequence, and tokens that pass the model together.
constexpr std::int64_t kSequence = 1024, kBatchTokens = 4096;

/// The value of --set TABLE.NAME.
std::optional<std::int64_t> chosen(const Request& request, const input::Schema& schema, const std::string& table,
                                   const std::string& name) {
  std::optional<std::int64_t> value;
  const std::string path = table + "." + name;
  for (const input::Override& given : overrides(request)) {
    const std::size_t equals = given.assignment.find('=');
    if (equals == std::string::npos || input::trim(given.assignment.substr(0, equals)) != path) continue;
    try {
      value = std::get<std::int64_t>(input::value_in(
          schema, path, fmt::format("[{}]\n{} = {}", table, name, given.assignment.substr(equals + 1)), "--set"));
    } catch (const Error&) {  // reported where the input is read
    }
  }
  return value;
}

/// The input of a model that has none, with the request's --set.
void read_directory_input(const language_model::HuggingfaceConfig& config, const Request& request,
                          const input::Schema& schema, const parallel::World& world) {
  const std::int64_t sequence = std::min(config.positions, kSequence),
                     used = chosen(request, schema, "data", "sequence").value_or(sequence);  // tokens pass together
  const std::string table = language_model::table_of(config.model), name = request.subject + "/config.json";
  Request own = request;
  own.subject = name;
  own.input_text = fmt::format("{}[data]\nsequence = {}\nbatch_tokens = {}\n", table, sequence,
                               used * std::max<std::int64_t>(1, kBatchTokens / used));
  read_input(own, schema, world);
  for (const input::Change& change : input::changed_keys(schema, table, name))
    if (change.path.starts_with("language_model.") && change.resume == input::Resume::fixed)
      throw collective_error(ExitCode::usage, "{}: {} is {}, not {} (the weights belong to it); remove this --set",
                             name, change.path, change.before, change.after);
}

void load_part(const model::Parameters& parameters, const checkpoint::Found& found, const parallel::World& world,
               const kernels::Execution& execution) {
  checkpoint::Registry registry;
  parameters.add_to(registry);
  checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);
}

}  // namespace

void require_no_hub_name(const std::string& path) {
  const std::filesystem::path place(path);
  if (!place.has_parent_path() || std::filesystem::exists(place.parent_path())) return;
  throw error(ExitCode::usage,
              "{}: no such run or directory (models of a hub are not downloaded); for a model of the Hugging Face hub: "
              "pip install huggingface_hub && hf download {} --local-dir DIR, then take DIR",
              path, path);
}

OpenedModel::OpenedModel(const Request& request, const parallel::World& world) {
  world.on_root([&] { require_no_hub_name(request.subject); });
  const input::Schema schema = bench::language_keys(input);
  read(request, schema, world);
  // The grid of a training run says nothing about this job.
  input.configuration.parallel.tensor = chosen(request, schema, "parallel", "tensor").value_or(1);
  if (const std::string why = language_model::obstacle_to_grid(configuration(), architecture); !why.empty())
    throw collective_error(ExitCode::usage, "{}: {}", name(), why);
}

/// Reads the input and the architecture.
void OpenedModel::read(const Request& request, const input::Schema& schema, const parallel::World& world) {
  if (language_model::is_huggingface_directory(request.subject)) {
    directory.emplace(request.subject);
    read_directory_input(directory->config(), request, schema, world);
    architecture = directory->architecture(configuration().data.sequence);
    architecture.model = configuration().language_model;  // dropout and sparse attention may be set
    architecture.lora = configuration().lora;
    if (architecture.lora.rank == 0 && language_model::is_peft_directory(request.subject))
      throw collective_error(
          ExitCode::usage,
          "{}: has adapters in addition to its weights (adapter_config.json), which would be left out; give "
          "lora.rank, lora.alpha and lora.initial, or remove them",
          request.subject);
    if (architecture.lora.rank == 0) return;
    if (architecture.lora.initial.empty())
      throw collective_error(ExitCode::usage,
                             "{}: lora.rank = {} without lora.initial (the directory has no adapters); name theirs",
                             request.subject, architecture.lora.rank);
    language_model::require_peft(architecture, architecture.lora.initial);
    return;
  }
  found = open_checkpoint(request.subject, world);
  require_kind(*found, "embedding/tokens", fmt::format("weft {} is for language models", request.command));
  read_input_of(*found, request, schema, world);
  architecture = language_model::stored_architecture(configuration(), found->manifest);
}

std::optional<language_model::Tokenizer> OpenedModel::tokenizer(const parallel::World& world,
                                                                const kernels::Execution& execution) const {
  std::optional<language_model::Tokenizer> tokenizer =
      found ? language_model::stored_tokenizer(*found, world, execution) : directory->tokenizer();
  if (tokenizer) tokenizer = tokenizer->adding_special_tokens(configuration().data.add_special_tokens);
  if (directory && tokenizer && tokenizer->vocabulary_size() > architecture.vocabulary)
    throw collective_error(ExitCode::data, "{}: its tokeniser has {} tokens, its model {}; do they belong together?",
                           directory->path().string(), tokenizer->vocabulary_size(), architecture.vocabulary);
  return tokenizer;
}

void OpenedModel::load(const language_model::Model& model, const parallel::World& world,
                       const kernels::Execution& execution) const {
  const bool adapted = model.architecture().lora.rank > 0;
  const auto load_weights = [&](const model::Parameters& parameters) {
    if (directory)
      directory->load(parameters, execution);
    else
      load_part(parameters, *found, world, execution);
  };
  if (adapted || architecture.lora.base == language_model::LoraBase::stored) {
    load_weights(model.parameters());
    if (adapted && directory)
      language_model::load_peft(model.parameters(), architecture, execution, architecture.lora.initial);
  } else {
    // The model without adapters is stored in another type than the frozen one, which adapters were trained with.
    const model::Parameters frozen(language_model::frozen_specs(architecture), configuration().optimizer.state,
                                   language_model::single_process(), 0, execution, model::Moments::none);
    load_weights(frozen);
    language_model::copy_weights(frozen, model.parameters(), execution);
  }
  if (architecture.lora.rank > 0 && !adapted)
    language_model::merge(adapters(world, execution), architecture, model.parameters(), execution);
}

model::Parameters OpenedModel::adapters(const parallel::World& world, const kernels::Execution& execution) const {
  if (architecture.lora.rank == 0)
    throw collective_error(ExitCode::usage, "{}: has no adapters (it was trained without lora.rank)", name());
  model::Parameters adapters(language_model::adapter_specs(architecture), configuration().optimizer.state,
                             language_model::single_process(), 0, execution, model::Moments::none);
  if (directory)
    language_model::load_peft(adapters, architecture, execution, architecture.lora.initial);
  else
    load_part(adapters, *found, world, execution);
  return adapters;
}

std::string OpenedModel::identity(const parallel::World& world) const {
  if (found) return storage::sha256(checkpoint::to_text(found->manifest));
  return world.on_root([&] {
    std::string parts = language_model::table_of(configuration().language_model);
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(directory->path()))
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    for (const std::filesystem::path& file : files) {
      const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
      parts += fmt::format("\n{} {} {}", file.filename().string(), bytes,
                           fmt::join(storage::sha256_segments(file, bytes, 0, storage::digest_segments(bytes),
                                                              storage::digest_threads()),
                                     " "));
    }
    return storage::sha256(parts);
  });
}

std::string OpenedModel::name() const {
  return found ? fmt::format("{} (step {})", found->path.string(), found->manifest.step) : directory->path().string();
}

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/model_rows.hpp"

#include <algorithm>

#include "base/format.hpp"
#include "language_model/run/memory_plan.hpp"
#include "parallel/watchdog.hpp"
#include "storage/digest.hpp"

namespace weft::commands {
namespace {

using language_model::activation_type;

OpenedModel open_model(const transcoder::Configuration& configuration, const parallel::World& world) {
  Request request;
  request.command = "lm harvest";
  request.subject = configuration.data.model;
  request.sets = {
      fmt::format("device.precision=\"{}\"", configuration.precision == device::Precision::fp32 ? "fp32" : "bf16"),
      fmt::format("device.backend=\"{}\"", configuration.device.backend), "device.attention=\"auto\"",
      fmt::format("parallel.tensor={}", configuration.parallel.tensor)};
  if (configuration.data.sequence > 0)
    request.sets.push_back(fmt::format("data.sequence={}", configuration.data.sequence));
  OpenedModel opened(request, world);
  parallel::set_timeout(configuration.parallel.timeout);  // reading the model's input has set its own
  return opened;
}

}  // namespace

ModelRows::Set::Set(Texts loaded, std::int64_t length)
    : texts(std::move(loaded)), stream(texts.sets), windows(language_model::windows_of(stream.size(), length)) {}

ModelRows::ModelRows(const transcoder::Configuration& configuration, const parallel::World& world)
    : settings_(configuration.data),
      opened_(open_model(configuration, world)),
      tokenizer_(opened_.tokenizer(world, {})),
      train_(open({settings_.text, "train", "data.text"}, world)) {
  const std::int64_t length = train_.windows.length;
  if (settings_.block_rows % length != 0)
    throw collective_error(
        ExitCode::usage,
        "data.block_rows = {} is not a multiple of the {} tokens of a window (data.sequence; a forward "
        "pass computes a block of whole windows); take {}",
        settings_.block_rows, length, std::max<std::int64_t>(1, settings_.block_rows / length) * length);
  if (const std::vector<std::string>& text = settings_.validation_text; !text.empty())
    validation_.emplace(open(text == std::vector<std::string>{dataset::kHeldOut}
                                 ? TextChoice{{}, "validation", "data.validation_text"}
                                 : TextChoice{text, "", "data.validation_text"},
                             world));
  datasets_.train = describe(train_);
  if (validation_) datasets_.validation = describe(*validation_);
  const dataset::Description& train = datasets_.train;
  if (settings_.layers > 0 && (settings_.layers != train.n_layers || settings_.d_model != train.d_model))
    throw collective_error(
        ExitCode::usage,
        "{}: has {} layers of width {}, data.layers and data.d_model are {} and {}; correct or remove "
        "them",
        opened_.name(), train.n_layers, train.d_model, settings_.layers, settings_.d_model);
}

ModelRows::Set ModelRows::open(const TextChoice& choice, const parallel::World& world) const {
  const std::int64_t length = opened_.configuration().data.sequence;
  Texts texts = load_texts(choice, opened_, tokenizer_, world);
  std::int64_t tokens = 0;
  for (const dataset::TokenSet& set : texts.sets) tokens += set.size();
  if (tokens < length)
    throw collective_error(ExitCode::data,
                           "{}: {} tokens are less than a window of {} (data.sequence); give more text with {}",
                           texts.names, tokens, length, choice.option);
  return Set(std::move(texts), length);
}

dataset::Description ModelRows::describe(const Set& set) const {
  const language_model::Configuration& configuration = opened_.configuration();
  dataset::Description description =
      language_model::describe(set.windows, configuration.language_model, activation_type(configuration));
  description.path = fmt::format("{} on {}", settings_.model, set.texts.names);
  description.model =
      opened_.found ? fmt::format("{}, step {}", settings_.model, opened_.found->manifest.step) : settings_.model;
  description.targets_are_inputs = settings_.targets == dataset::Targets::inputs;
  description.source_bytes =
      language_model::forward_bytes(configuration, opened_.architecture, settings_.block_rows) +
      language_model::MlpRecorder::bytes(settings_.block_rows, description.dtype, configuration.language_model);
  return description;
}

std::string ModelRows::summary() const {
  const dataset::Description& train = datasets_.train;
  std::string text = fmt::format("{}: activations are computed while training runs\n", train.path);
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<13} {}\n", name, value);
  };
  line("model", train.model);
  line("inputs", train.hook_inputs);
  line("targets", train.hook_targets);
  line("shape", fmt::format("{} layers, d_model {}, {} rows, {}", train.n_layers, train.d_model, train.n_rows,
                            dataset::name_of(train.dtype)));
  line("windows", fmt::format("{} tokens each, {} in a forward pass", train_.windows.length,
                              settings_.block_rows / train_.windows.length));
  if (datasets_.validation)
    line("validation", fmt::format("{}, {} rows", validation_->texts.names, datasets_.validation->n_rows));
  return text;
}

RunningModel::RunningModel(const ModelRows& rows, transcoder::Datasets& data, const device::Runtime& runtime,
                           const parallel::World& world)
    : model(rows.opened_, world, runtime.execution()),
      forward(rows.opened_.configuration(), model, rows.settings_.block_rows, false),
      recorder(rows.settings_.block_rows, data.train.dtype, rows.opened_.architecture.model, forward.transformer,
               forward.staging, runtime.execution()),
      train(rows.train_.windows, rows.train_.stream, rows.settings_.block_rows, recorder, &model.ranks.copy) {
  const std::string identity = rows.opened_.identity(world);
  const auto attach = [&](const ModelRows::Set& set, language_model::TextRows& source,
                          dataset::Description& description) {
    description.source = &source;
    description.fingerprint =
        "ends:" + storage::sha256(fmt::format("{} {} {}", identity, set.stream.fingerprint(), set.windows.length));
  };
  attach(rows.train_, train, data.train);
  if (!rows.validation_) return;
  validation.emplace(rows.validation_->windows, rows.validation_->stream, rows.settings_.block_rows, recorder,
                     &model.ranks.copy);
  attach(*rows.validation_, *validation, *data.validation);
}

}  // namespace weft::commands

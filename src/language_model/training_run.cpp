// SPDX-License-Identifier: Apache-2.0
#include "language_model/training_run.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "parallel/watchdog.hpp"
#include "report/format.hpp"
#include "storage/token_file.hpp"

namespace weft::language_model {
namespace {

constexpr const char* kTokenizer = "tokenizer";

checkpoint::Tensor text_tensor(std::vector<std::uint8_t>& text, bool writes) {
  const auto size = static_cast<std::int64_t>(text.size());
  return {.name = kTokenizer,
          .type = kernels::Scalar::u8,
          .shape = {size},
          .held = {0, size},
          .owned = {0, writes ? size : 0},
          .data = text.data()};
}

}  // namespace

Architecture architecture_of(const Configuration& configuration, const Corpus& corpus) {
  return {
      .model = configuration.language_model, .vocabulary = corpus.vocabulary, .positions = configuration.data.sequence};
}

std::string summary(const Corpus& corpus) {
  const auto set = [](const dataset::TokenSet& tokens) {
    // Of a text, in memory, the size says all.
    return tokens.n_files() > 0 ? tokens.summary()
                                : fmt::format("{}: {} tokens\n", tokens.name(), report::grouped(tokens.size()));
  };
  return set(corpus.train) + (corpus.validation ? "validation: " + set(*corpus.validation) : "no validation data\n") +
         fmt::format("tokeniser: {}, vocabulary {}\n", corpus.tokenizer ? corpus.tokenizer->kind() : "none",
                     report::grouped(corpus.vocabulary));
}

std::optional<Tokenizer> stored_tokenizer(const checkpoint::Found& found, const parallel::World& world,
                                          const kernels::Execution& execution) {
  for (const checkpoint::TensorEntry& tensor : found.manifest.tensors) {
    if (tensor.name != kTokenizer) continue;
    if (tensor.type != kernels::Scalar::u8 || tensor.shape.size() != 1 || tensor.shape[0] > storage::kLargestTokenizer)
      throw collective_error(ExitCode::data, "{}: the tensor \"{}\" is not the text of a tokeniser",
                             found.path.string(), kTokenizer);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tensor.shape[0]));
    checkpoint::Registry registry;
    registry.add(text_tensor(bytes, world.rank() == 0));
    checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);
    return Tokenizer::from_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                                fmt::format("{}, tensor \"{}\"", found.path.string(), kTokenizer));
  }
  return std::nullopt;
}

TrainingRun::TrainingRun(const Configuration& configuration, const Corpus& corpus, const checkpoint::Found* found,
                         const parallel::World& world, const parallel::Grid& grid, const device::Runtime& runtime)
    : configuration_(configuration),
      corpus_(corpus),
      execution_(runtime.execution()),
      batches_(corpus.train, configuration.data, static_cast<std::uint64_t>(configuration.run.seed)),
      trainer_(configuration, architecture_of(configuration, corpus), grid, runtime.execution()) {
  const std::string text = corpus.tokenizer ? corpus.tokenizer->text() : "";
  if (found != nullptr) {
    const std::optional<Tokenizer> stored = stored_tokenizer(*found, world, execution_);
    if ((stored ? stored->text() : "") != text)
      throw collective_error(ExitCode::usage,
                             "{}: its model has another tokeniser than {} (the ids would mean other tokens); resume "
                             "with the data of the run, or start a new one with another --output",
                             found->path.string(), corpus.train.name());
  }
  tokenizer_.assign(text.begin(), text.end());
  if (!tokenizer_.empty()) trainer_.registry().add(text_tensor(tokenizer_, world.is_root()));
}

void TrainingRun::initialise() {
  trainer_.initialise();
  if (trainer_.tuning().needs_range_test()) find_learning_rate();
}

/// A sweep over the first batches; then all is as before it, but for the learning rate.
void TrainingRun::find_learning_rate() {
  parallel::note_phase("finding the learning rate");
  const double rate = training::range_test(trainer_.registry(), execution_, [this](double learning_rate) {
    dataset::TokenBatch batch = trainer_.next_batch();
    batches_.fill(token_, 0, batch);
    trainer_.step_at_rate(batch, learning_rate);
    token_ += batch.rows();
    return trainer_.metrics().loss;
  });
  trainer_.resume_at(0);
  token_ = 0;
  trainer_.tuning().set_rate(rate);
  log::info("optimizer.tuning = \"range\": learning rate {:.3g} instead of {:.3g}", rate,
            configuration_.optimizer.learning_rate);
}

void TrainingRun::resume_at(std::int64_t step, const training::Cursor& cursor) {
  const auto found = cursor.find("token");
  if (found == cursor.end())
    throw collective_error(ExitCode::io,
                           "the checkpoint's cursor has no \"token\" (it belongs to another kind of model); start a "
                           "new run with another --output");
  token_ = found->second;
  trainer_.resume_at(step);
}

training::Step TrainingRun::step() {
  dataset::TokenBatch batch = trainer_.next_batch();
  batches_.fill(token_, 0, batch);
  trainer_.step(batch);
  token_ += batch.rows();
  return {.work = batch.rows()};
}

training::Metrics TrainingRun::metrics() {
  const Trainer::Metrics now = trainer_.metrics();
  training::Metrics metrics = {
      {.name = "epoch", .value = static_cast<double>(token_) / static_cast<double>(corpus_.train.size())},
      {.name = "learning_rate", .value = now.learning_rate},
      {.name = "loss", .value = now.loss, .progress = "loss {:.4f}", .in_result = true},
      {.name = "gradient_norm", .value = now.gradient_norm},
      {.name = "skipped_steps", .value = now.skipped_steps}};
  if (now.loss_scale > 0) metrics.push_back({.name = "loss_scale", .value = now.loss_scale});
  if (configuration_.data.sequence_start > 0) metrics.push_back({.name = "sequence", .value = trainer_.length()});
  return metrics;
}

const EvaluationResult& TrainingRun::validate() {
  if (validated_step_ != trainer_.steps_done())
    validation_ =
        language_model::evaluate(*corpus_.validation, configuration_.data.sequence, configuration_.micro_tokens(),
                                 trainer_.transformer(), trainer_.staging(), execution_);
  validated_step_ = trainer_.steps_done();
  return *validation_;
}

training::Metrics TrainingRun::evaluate() {
  training::Metrics metrics;
  if (corpus_.validation)
    metrics.push_back({.name = "validation.loss", .value = validate().loss, .progress = "validation {:.4f}"});
  print_sample();
  return metrics;
}

/// A text that begins like the training set.
void TrainingRun::print_sample() {
  if (configuration_.sample.tokens == 0 || !corpus_.tokenizer) return;
  std::vector<std::uint32_t> prompt(1);
  corpus_.train.read(0, prompt);
  const Sampling sampling{.tokens = configuration_.sample.tokens,
                          .temperature = configuration_.sample.temperature,
                          .length = configuration_.data.sequence,
                          .seed = static_cast<std::uint64_t>(configuration_.run.seed),
                          .step = static_cast<std::uint64_t>(trainer_.steps_done())};
  std::vector<std::uint32_t> text = sample(sampling, prompt, trainer_.transformer(), trainer_.staging());
  text.insert(text.begin(), prompt.begin(), prompt.end());
  log::info("sample after step {}:\n{}", trainer_.steps_done(), printable_lines(corpus_.tokenizer->decode(text)));
}

void TrainingRun::conclude(report::Json& result) {
  if (corpus_.validation) {
    result["validation"] = to_json(validate());
    log::info("validation data: {}", to_text(validate()));
  }
  if (configuration_.log.evaluate_every == 0 || trainer_.steps_done() % configuration_.log.evaluate_every != 0)
    print_sample();
}

}  // namespace weft::language_model

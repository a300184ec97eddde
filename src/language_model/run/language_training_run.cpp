// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/language_training_run.hpp"

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "language_model/huggingface/peft.hpp"
#include "language_model/run/pass_work.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/run/stored_tokenizer.hpp"
#include "parallel/watchdog.hpp"
#include "privacy/mode_choice.hpp"
#include "run/run_record.hpp"

namespace weft::language_model {

Architecture architecture_of(const Configuration& configuration, const Corpus& corpus,
                             const std::optional<InitialModel>& initial) {
  Architecture architecture{.model = configuration.language_model,
                            .vocabulary = corpus.vocabulary,
                            .positions = configuration.data.sequence,
                            .lora = configuration.lora};
  if (configuration.initial.empty() && configuration.lora.rank > 0)
    throw collective_error(ExitCode::usage,
                           "lora.rank = {} without language_model.initial (random weights would stay as they are); "
                           "name the model to adapt",
                           configuration.lora.rank);
  if (initial) architecture.family = initial->family();
  if (!configuration.lora.initial.empty()) require_peft(architecture, configuration.lora.initial);
  if (!initial) return architecture;
  architecture.vocabulary = initial->vocabulary();
  architecture.context = initial->context();
  if (corpus.vocabulary > architecture.vocabulary)
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": has a vocabulary of {}, the data of {}; take the "
                           "tokeniser of the model (data.tokens)",
                           configuration.initial, architecture.vocabulary, corpus.vocabulary);
  initial->require_weights(configuration, architecture);
  return architecture;
}

namespace {

/// Architecture of a run. A resumed run has the longest text and the family of its checkpoint.
Architecture architecture_of(const Configuration& configuration, const Corpus& corpus, const checkpoint::Found* found,
                             const parallel::World& world) {
  Architecture architecture = architecture_of(configuration, corpus, open_initial(configuration, world));
  if (found == nullptr) return architecture;
  Architecture stored = stored_architecture(configuration, found->manifest);
  architecture.context = stored.context;
  architecture.family = std::move(stored.family);
  return architecture;
}

Trainer make_trainer(const Configuration& configuration, const Architecture& architecture, const parallel::Grid& grid,
                     const kernels::Execution& execution) {
  return {with_clipping_mode(configuration, architecture, grid.shape(), execution.backend), architecture, grid,
          execution};
}

}  // namespace

std::string summary(const Corpus& corpus) {
  const auto set = [](const dataset::TokenSet& tokens) {
    // A text in memory has no files to describe: its size suffices.
    return tokens.n_files() > 0
               ? tokens.summary()
               : fmt::format("{}: {}, {} tokens\n", tokens.name(), tokens.has_documents() ? "JSON Lines" : "text",
                             format::grouped(tokens.size()));
  };
  const dataset::DocumentRows* const rows = corpus.segments.documents();
  return set(corpus.train) + (rows != nullptr ? "training: " + rows->summary() + "\n" : "") +
         (corpus.validation ? "validation: " + set(*corpus.validation) : "no validation data\n") +
         fmt::format("tokeniser: {}, vocabulary {}\n", corpus.tokenizer ? corpus.tokenizer->kind() : "none",
                     format::grouped(corpus.vocabulary));
}

TrainingRun::TrainingRun(const Configuration& configuration, const Corpus& corpus, const checkpoint::Found* found,
                         const parallel::World& world, const parallel::Grid& grid, const device::Runtime& runtime)
    : configuration_(configuration),
      corpus_(corpus),
      world_(world),
      execution_(runtime.execution()),
      batches_(corpus.segments, configuration.data, static_cast<std::uint64_t>(configuration.run.seed)),
      data_ranks_(grid.axis(parallel::kDataAxis)),
      trainer_(
          make_trainer(configuration, architecture_of(configuration, corpus, found, world), grid, runtime.execution())),
      sample_arena_(runtime.execution(), grid) {
  if (corpus.validation) validation_segments_.emplace(*corpus.validation, configuration.data);
  if (configuration.sample.tokens > 0 && corpus.tokenizer) {
    GenerationSettings samples =
        sample_settings(configuration, trainer_.model().architecture(), grid.shape(), grid.world().rank());
    samples.vocabulary = corpus.tokenizer->vocabulary_size();
    generator_.emplace(samples, trainer_.transformer(), execution_, trainer_.timers(), sample_arena_);
  }
  const std::string text = corpus.tokenizer ? corpus.tokenizer->text() : "";
  std::string stored_text = corpus.tokenizer ? corpus.tokenizer->stored_text() : "";
  if (found != nullptr) {
    const std::optional<Tokenizer> stored = stored_tokenizer(*found, world, execution_);
    if ((stored ? stored->text() : "") != text)
      throw collective_error(ExitCode::usage,
                             "{}: its model has another tokeniser than {} (the ids would mean other tokens); resume "
                             "with the data of the run, or start a new one with another --output",
                             found->path.string(), corpus.train.name());
    if (stored) stored_text = stored->stored_text();  // of the same size as in the checkpoint
  }
  if (configuration.privacy.enabled) {
    records_ = private_records(configuration, corpus.train);
    account_.emplace(configuration.privacy, records_.rate(),
                     privacy::Record{configuration.privacy.unit, configuration.data.sequence + 1, records_.count},
                     configuration.initial);
    account_->register_in(trainer_.registry(), world.is_root());
    if (const privacy::Settings& chosen = trainer_.privacy(); chosen.algorithm != privacy::Algorithm::naive)
      run::run_record()["clipping"] = {{"mode", privacy::name_of(chosen.mode)}};
  }
  tokenizer_.assign(stored_text.begin(), stored_text.end());
  if (!tokenizer_.empty()) trainer_.registry().add(tokenizer_tensor(tokenizer_, world.is_root()));
}

void TrainingRun::initialise() {
  trainer_.initialise();
  if (account_)
    account_->begin(static_cast<std::uint64_t>(configuration_.run.seed), configuration_.run.steps, world_.all());
  if (!configuration_.initial.empty()) {
    const InitialModel initial(configuration_, world_);
    initial.load(trainer_.model().parameters(), world_, execution_);
    if (account_ && world_.is_root() && !initial.is_private())
      log::warning(
          "language_model.initial = \"{}\" was not trained privately, as far as is known: no guarantee covers what "
          "these weights reveal about the data that they were trained on, which must not be the private ones",
          configuration_.initial);
  }
  if (!configuration_.lora.initial.empty())
    load_peft(trainer_.model().parameters(), trainer_.model().architecture(), execution_, configuration_.lora.initial);
  if (trainer_.tuning().needs_range_test()) find_learning_rate();
}

/// Sweeps the learning rate over the first batches, then restores all state but the learning rate.
void TrainingRun::find_learning_rate() {
  parallel::note_phase("finding the learning rate");
  const double rate = model::range_test(trainer_.registry(), execution_, [this](double learning_rate) {
    const std::int64_t first = trainer_.first_sequence();
    dataset::TokenBatch batch = trainer_.next_batch();
    batches_.fill(token_, first, batch);
    trainer_.step_at_rate(batch, learning_rate);
    token_ += configuration_.data.batch_tokens;
    return trainer_.metrics().loss;
  });
  trainer_.resume_at(0);
  token_ = 0;
  trainer_.tuning().set_rate(rate);
  log::info("optimizer.tuning = \"range\": learning rate {:.3g} instead of {:.3g}", rate,
            configuration_.optimizer.learning_rate);
}

void TrainingRun::resume_at(std::int64_t step, const run::Cursor& cursor) {
  const auto found = cursor.find("token");
  if (found == cursor.end())
    throw collective_error(ExitCode::io,
                           "the checkpoint's cursor has no \"token\" (it belongs to another kind of model); start a "
                           "new run with another --output");
  token_ = found->second;
  trainer_.resume_at(step);
  if (account_)
    account_->resume(static_cast<std::uint64_t>(configuration_.run.seed), step, configuration_.run.steps, changed_,
                     world_.all());
}

/// The number of records of the step is private, so work and position in the data are expectations.
run::Step TrainingRun::private_step() {
  const std::int64_t tokens = configuration_.data.batch_tokens;
  const std::vector<std::int64_t> own = account_->draw(trainer_.steps_done() + 1, data_ranks_);
  trainer_.set_noise(account_->noise(records_.expected));
  language_model::private_step(trainer_, records_, corpus_.train, own);
  account_->count_step();
  token_ += tokens;
  return {.work = tokens};
}

run::Step TrainingRun::step() {
  if (account_) return private_step();
  const std::int64_t first = trainer_.first_sequence(), tokens = configuration_.data.batch_tokens;
  dataset::TokenBatch batch = trainer_.next_batch();
  batches_.fill(token_, first, batch);
  trainer_.step(batch);
  token_ += tokens;
  return {.work = tokens};
}

run::Communication TrainingRun::communication() const {
  return {.exchanges = trainer_.exchanges(),
          .timed = trainer_.exchanges_are_timed(),
          .step_bytes_sent = trainer_.step_bytes_sent(),
          .step_exposed_seconds = trainer_.step_exposed_seconds()};
}

std::vector<std::pair<std::string, double>> TrainingRun::phase_bytes() {
  return language_model::phase_bytes(configuration_, trainer_.model().architecture());
}

run::Metrics TrainingRun::metrics() {
  const Trainer::Metrics now = trainer_.metrics();
  run::Metrics metrics = {
      {.name = "epoch", .value = static_cast<double>(token_) / static_cast<double>(batches_.epoch_tokens())},
      {.name = "learning_rate", .value = now.learning_rate}};
  // The loss on private data, without noise, is not released; the norm is that of the gradient with its noise.
  if (!account_) metrics.push_back({.name = "loss", .value = now.loss, .progress = "loss {:.4f}", .in_result = true});
  metrics.push_back({.name = "gradient_norm", .value = now.gradient_norm});
  if (configuration_.privacy.adapts_clip())
    metrics.push_back({.name = "clip_bound", .value = now.clip_bound, .progress = "clip {:.3g}"});
  metrics.push_back({.name = "skipped_steps", .value = now.skipped_steps});
  if (now.loss_scale > 0) metrics.push_back({.name = "loss_scale", .value = now.loss_scale});
  if (configuration_.data.sequence_start > 0) metrics.push_back({.name = "sequence", .value = trainer_.length()});
  return metrics;
}

const EvaluationResult& TrainingRun::validate() {
  if (validated_step_ != trainer_.steps_done())
    validation_ =
        language_model::evaluate(*validation_segments_, configuration_.data.sequence, configuration_.micro_tokens(),
                                 trainer_.transformer(), trainer_.staging(), execution_, &trainer_.ranks());
  validated_step_ = trainer_.steps_done();
  return *validation_;
}

run::Metrics TrainingRun::evaluate() {
  run::Metrics metrics;
  if (corpus_.validation)
    metrics.push_back(
        {.name = "validation.loss", .value = validate().loss, .progress = "validation {:.4f}", .compared = true});
  print_sample();
  return metrics;
}

/// Prints, once after a step, a text that begins like the training set; for private training with the first token of
/// the vocabulary.
void TrainingRun::print_sample() {
  if (!generator_ || sampled_step_ == trainer_.steps_done()) return;
  sampled_step_ = trainer_.steps_done();
  std::vector<std::uint32_t> text(1);
  if (!account_) corpus_.train.read(0, text);
  const std::uint32_t prompt = text.front();
  const GenerationRequest request{.prompt = {&prompt, 1}};
  generator_->run({&request, 1}, static_cast<std::uint64_t>(configuration_.run.seed),
                  static_cast<std::uint64_t>(trainer_.steps_done()), [&](std::size_t, const kernels::Drawn& drawn) {
                    text.push_back(drawn.token);
                    return true;
                  });
  log::info("sample after step {}:\n{}", trainer_.steps_done(), printable_lines(corpus_.tokenizer->detokenise(text)));
}

void TrainingRun::conclude(Json& result) {
  if (corpus_.validation) {
    result["validation"] = to_json(validate());
    log::info("validation data: {}", to_text(validate()));
  }
  print_sample();
  if (!account_) return;
  const privacy::Guarantee guarantee =
      account_->guarantee(world_.all(), configuration_.run.steps - trainer_.steps_done());
  result["privacy"] = privacy::to_json(guarantee);
  guarantee_ = privacy::to_text(guarantee);
}

}  // namespace weft::language_model

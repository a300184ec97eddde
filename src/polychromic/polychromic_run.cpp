// SPDX-License-Identifier: Apache-2.0
#include "polychromic/polychromic_run.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/log.hpp"
#include "base/text.hpp"
#include "language_model/generation/growing_text.hpp"
#include "language_model/huggingface/sentence_transformers.hpp"
#include "parallel/watchdog.hpp"
#include "polychromic/answer_work.hpp"
#include "storage/json_file.hpp"
#include "storage/mapped_file.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

constexpr const char* kReference = "policy/reference";
constexpr const char* kSamples = "samples.json";
/// Prompts whose answers are written out.
constexpr std::int64_t kShownPrompts = 4;
/// Answers, at least, from which the reward of the initial model is measured.
constexpr std::int64_t kTargetAnswers = 2048;
/// First number of evaluation prompts in the keys of random numbers, larger than those of training.
constexpr std::int64_t kEvaluationNumbers = std::int64_t{1} << 19;

std::int64_t largest_prompts(const Configuration& configuration) {
  return parallel::largest_part(configuration.polychromic.prompts, configuration.parallel.data);
}
/// Tokens of the longest prompt with its answer.
std::int64_t longest_text(const Configuration& configuration, const Prompts& prompts) {
  return prompts.longest() + configuration.polychromic.max_new_tokens;
}

/// Settings of generation for `rank` of the grid, whose part of the model they describe.
GenerationSettings generation(const Configuration& configuration, const Architecture& architecture,
                              const Prompts& prompts, std::int64_t rank) {
  const parallel::GridShape grid = grid_shape(configuration);
  GenerationSettings settings =
      answer_settings(configuration, part_of(architecture, grid, rank), largest_prompts(configuration),
                      prompts.longest(), head_chunk(transformer_settings(configuration, architecture, grid, rank)));
  settings.vocabulary = prompts.vocabulary();
  return settings;
}

PolicyBatch::Settings batch_settings(const Configuration& configuration, const Prompts& prompts) {
  return {.sequences = largest_prompts(configuration) * configuration.polychromic.samples,
          .length = longest_text(configuration, prompts),
          .micro_rows = configuration.micro_tokens(),
          .vocabulary = prompts.vocabulary(),
          .temperature = configuration.polychromic.temperature,
          .top_p = configuration.polychromic.top_p};
}

/// The texts of these ranks, in rank order. Collective.
std::vector<std::string> gather(const std::string& text, const parallel::Communicator& ranks) {
  const auto count = static_cast<std::size_t>(ranks.size());
  std::vector<std::int64_t> bytes(count);
  const std::int64_t own = std::ssize(text);
  ranks.all_gather(&own, bytes.data(), sizeof own);
  std::string all;
  for (const std::int64_t size : bytes) all.resize(all.size() + static_cast<std::size_t>(size));
  ranks.all_gather_uneven(text.data(), all.data(), bytes);
  std::vector<std::string> texts;
  std::size_t begin = 0;
  for (const std::int64_t size : bytes) {
    texts.push_back(all.substr(begin, static_cast<std::size_t>(size)));
    begin += static_cast<std::size_t>(size);
  }
  return texts;
}

Json shown(const Answers& answers, const Judgement& judgement, const Tokenizer& tokenizer) {
  Json texts = Json::array();
  for (const AnswerIds& ids : answers.ids) texts.push_back(valid_utf8(tokenizer.detokenise(ids, true)));
  return {{"prompt", answers.prompt.text},
          {"answers", texts},
          {"rewards", judgement.rewards},
          {"diversity", judgement.semantic}};
}

}  // namespace

// --- Settings -------------------------------------------------------------------------------------------------------

void require_settings(const Configuration& configuration, const Architecture& architecture, const Prompts& prompts,
                      const language_model::Tokenizer& tokenizer, const parallel::World& world) {
  const auto refuse = [](const std::string& why) { throw collective_error(ExitCode::usage, "{}", why); };
  const ModelSettings& model = architecture.model;
  if (configuration.initial.empty())
    refuse(
        "weft lm polychromic without language_model.initial (it trains a model further that can already write); give a "
        "run, a checkpoint or a directory of Hugging Face");
  if (const std::string why = generation_obstacle(model, architecture.positions); !why.empty())
    refuse(fmt::format("weft lm polychromic: text of this model cannot be generated ({})", why));
  if (configuration.polychromic.top_p < 1 && (model.logit_softcap > 0 || configuration.parallel.tensor > 1))
    refuse(
        "polychromic.top_p with language_model.logit_softcap or parallel.tensor (the loss is that of all tokens "
        "there); "
        "set top_p to 1");
  if (!configuration.lora.initial.empty())
    refuse(
        "weft lm polychromic with lora.initial (the frozen model is the initial one without adapters, not the one that "
        "the training begins with); merge them into language_model.initial");
  if (configuration.privacy.enabled)
    refuse(
        "weft lm polychromic with privacy (the gradient of the answers is not clipped per record: the guarantee would "
        "not "
        "hold); set privacy.enabled to false");
  if (configuration.parallel.shard == parallel::Shard::full)
    refuse(
        "weft lm polychromic with parallel.shard = \"full\" (ranks draw different numbers of tokens, with a whole "
        "model "
        "each); take \"gradients\", or divide the model by parallel.tensor");
  if (configuration.precision == Precision::fp16)
    refuse(
        "weft lm polychromic with device.precision = \"fp16\" (the gradient of the objective has no loss scale); take "
        "\"bf16\"");
  if (configuration.fp8)
    refuse(
        "weft lm polychromic with device.fp8 (answers are drawn in bf16: their probabilities would be those of another "
        "model); leave it out");
  if (longest_text(configuration, prompts) > configuration.data.sequence)
    refuse(
        fmt::format("the longest prompt has {} tokens, and polychromic.max_new_tokens = {}: together they do not fit "
                    "data.sequence = {}; take shorter ones",
                    prompts.longest(), configuration.polychromic.max_new_tokens, configuration.data.sequence));
  if (const std::int64_t longest = prompts.longest_with_reference() + configuration.polychromic.max_new_tokens;
      longest > configuration.data.sequence)
    refuse(
        fmt::format("polychromic.reward = \"reference_likelihood\": a prompt, polychromic.max_new_tokens and its "
                    "reference have {} tokens together, and data.sequence = {}; take shorter ones",
                    longest, configuration.data.sequence));
  const GenerationSettings settings = generation(configuration, architecture, prompts, 0);
  if (settings.most_rows() > configuration.micro_tokens())
    refuse(
        fmt::format("prompts of {} tokens are computed in {} rows, more than the {} tokens of a micro-batch; raise "
                    "data.micro_tokens or data.batch_tokens",
                    prompts.longest(), settings.most_rows(), configuration.micro_tokens()));
  if (const std::string& embedder = configuration.polychromic.embedder; !embedder.empty())
    return world.on_root([&] { language_model::SentenceEncoder::size(embedder); });
  if (configuration.polychromic.diversity != DiversityMeasure::semantic &&
      configuration.polychromic.semantic_weight == 0)
    return;
  world.on_root([&] {
    const std::optional<std::int64_t> longest =
        language_model::require_mean_embedding(configuration.initial, tokenizer);
    if (longest && longest_text(configuration, prompts) > *longest)
      throw error(ExitCode::usage,
                  "language_model.initial = \"{}\": sentence-transformers cuts its texts after {} tokens (the longest "
                  "prompt has {}, and polychromic.max_new_tokens = {}); take shorter ones, or name a copy of the "
                  "directory without modules.json",
                  configuration.initial, *longest, prompts.longest(), configuration.polychromic.max_new_tokens);
  });
}

void add_memory(Plan& plan, const Configuration& configuration, const Prompts& prompts) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  model::StepArena arena(backend);
  const parallel::GridShape grid = grid_shape(configuration);
  const std::int64_t last = grid.ranks() - 1;  // its parts are the largest
  const TransformerSettings frozen = Judge::forward_settings(configuration, plan.architecture, grid, last);
  const Generator::Buffers generator(generation(configuration, plan.architecture, prompts, last), arena);
  const PolicyBatch::Buffers batch(batch_settings(configuration, prompts), arena);
  const Judge::Buffers judge(configuration, plan.architecture,
                             largest_prompts(configuration) * configuration.polychromic.samples, arena);
  const Transformer::Buffers transformer(frozen, arena);
  const Staging::Buffers staging(frozen.rows, false, false, arena);
  const Embedder::Buffers embedder(frozen, arena);
  const model::StateBytes state = model::largest_state_bytes(
      parameter_specs(plan.architecture), grid, configuration.optimizer.state, backend, model::Moments::none);
  if (plan.architecture.lora.rank == 0 && configuration.polychromic.uses_frozen_model())  // else that of the run
    plan.device.emplace_back("frozen model", state.total() + 4 * rotary_elements(plan.architecture));
  if (const std::string& embedder = configuration.polychromic.embedder; !embedder.empty())
    plan.device.emplace_back("embedder", language_model::SentenceEncoder::size(embedder).bytes);
  plan.device.emplace_back("answers: generation, judgement", arena.device_bytes());
  plan.host.emplace_back("answers", arena.host_bytes());
}

namespace {

/// The initial model, with the tokeniser of the corpus.
InitialModel initial_model(const Configuration& configuration, const Corpus& corpus, const parallel::World& world,
                           const kernels::Execution& execution) {
  InitialModel initial(configuration, world);
  const std::optional<Tokenizer> tokenizer = initial.tokenizer(world, execution);
  if (tokenizer && tokenizer->text() != corpus.tokenizer->text())
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": has another tokeniser than {} (the ids would mean other "
                           "tokens); train further on its text, or give its tokeniser as data.tokens",
                           configuration.initial, corpus.train.name());
  return initial;
}

}  // namespace

// --- Run ------------------------------------------------------------------------------------------------------------

PolychromicRun::PolychromicRun(const Configuration& configuration, const Corpus& corpus, const Prompts& prompts,
                               const checkpoint::Found* found, const parallel::World& world, const parallel::Grid& grid,
                               const device::Runtime& runtime)
    : configuration_(configuration),
      settings_(configuration.polychromic),
      prompts_(prompts),
      tokenizer_(*corpus.tokenizer),
      world_(world),
      execution_(runtime.execution()),
      groups_(grid.axis(parallel::kDataAxis)),
      leads_(grid.index(parallel::kTensorAxis) == 0),
      own_(grid.part(parallel::kDataAxis, settings_.prompts)),
      base_(configuration, corpus, found, world, grid, runtime),
      arena_(runtime.execution(), grid),
      judge_(configuration, base_.trainer(), tokenizer_, largest_prompts(configuration) * settings_.samples,
             initial_model(configuration, corpus, world, execution_), world, grid, execution_, base_.timers(), arena_),
      generator_(generation(configuration, base_.trainer().model().architecture(), prompts, grid.world().rank()),
                 base_.trainer().transformer(), execution_, base_.timers(), arena_),
      batch_(batch_settings(configuration, prompts), execution_, arena_),
      present_(own_.size() * settings_.samples, longest_text(configuration, prompts)),
      constraint_(settings_) {
  keep_reference(found);
  if (settings_.epochs > 1)
    present_.add_to(base_.registry(), {own_.begin * settings_.samples, own_.end * settings_.samples},
                    settings_.prompts * settings_.samples, leads_);
  if (settings_.holds_reward()) constraint_.add_to(base_.registry(), world_.is_root());
}

/// Frozen weights that are not in checkpoints have their digest there, so that a resumed run has the same ones.
void PolychromicRun::keep_reference(const checkpoint::Found* found) {
  const std::string digest = judge_.digest();
  if (digest.empty()) return;
  const auto size = std::ssize(digest);
  reference_.resize(digest.size());
  const auto tensor = [&](std::vector<std::uint8_t>& text, bool writes) -> checkpoint::Tensor {
    return {.name = kReference,
            .type = kernels::Scalar::u8,
            .shape = {size},
            .held = {0, size},
            .owned = {0, writes ? size : 0},
            .data = text.data()};
  };
  if (found != nullptr) {
    checkpoint::Registry registry;
    registry.add(tensor(reference_, world_.is_root()));
    checkpoint::load(world_.all(), *found, registry, execution_, checkpoint::Load::part);
    if (!std::equal(digest.begin(), digest.end(), reference_.begin()))
      throw collective_error(
          ExitCode::usage,
          "language_model.initial = \"{}\"{}: has other weights than when this run began (the frozen model would be "
          "another); name what it began with",
          configuration_.initial,
          settings_.embedder.empty() ? "" : fmt::format(" or polychromic.embedder = \"{}\"", settings_.embedder));
  }
  std::copy(digest.begin(), digest.end(), reference_.begin());
  base_.registry().add(tensor(reference_, world_.is_root()));
}

PolychromicRun::Present::Present(std::int64_t answers, std::int64_t longest_)
    : longest(longest_),
      tokens(static_cast<std::size_t>(answers * longest_)),
      sizes(static_cast<std::size_t>(answers * 2)),
      factors(static_cast<std::size_t>(answers)),
      first(static_cast<std::size_t>(answers * longest_)) {}

void PolychromicRun::Present::add_to(checkpoint::Registry& registry, parallel::Range own, std::int64_t all,
                                     bool writes) {
  const auto add = [&](const char* name, kernels::Scalar type, std::vector<std::int64_t> shape, void* data) {
    registry.add({.name = std::string("policy/") + name,
                  .type = type,
                  .shape = std::move(shape),
                  .held = own,
                  .owned = {own.begin, writes ? own.end : own.begin},
                  .data = data});
  };
  add("tokens", kernels::Scalar::u32, {all, longest}, tokens.data());
  add("sizes", kernels::Scalar::i64, {all, 2}, sizes.data());
  add("factors", kernels::Scalar::fp32, {all}, factors.data());
  add("log_probabilities", kernels::Scalar::fp32, {all, longest}, first.data());
}

run::Step PolychromicRun::step() {
  Trainer& trainer = base_.trainer();
  const std::int64_t step = trainer.steps_done() + 1;
  const bool draws = draws_at(step), trains = trains_at(step);
  if (draws) draw(step);
  if (trains) {
    weigh(draws);
    std::int64_t passes = batch_.passes();
    if (configuration_.shard() == parallel::Shard::gradients) groups_.maximum({&passes, 1});
    trainer.add_objective([&, passes](const kernels::AdamStep* constants, model::GradientSink& sink,
                                      const std::function<void()>& between) {
      const run::Timers::Whole timed(base_.timers(), "policy backward");
      batch_.add_gradients(trainer.transformer(), constants, sink, passes, between);
    });
  }
  const run::Step done = base_.step();
  if (trains) trainer.add_objective({});
  if (trains && draws) note_probabilities();
  return done;
}

/// Draws the answers of this group of ranks to the prompts of a step.
void PolychromicRun::draw(std::int64_t step) {
  std::vector<Prompt> prompts;
  for (std::int64_t number = own_.begin; number < own_.end; ++number)
    prompts.push_back(prompts_.training(step / settings_.every - 1, number));
  std::vector<Answers> answers;
  {
    const run::Timers::Whole timed(base_.timers(), "generate");
    answers = draw_answers(generator_, tokenizer_, std::move(prompts), settings_.samples,
                           static_cast<std::uint64_t>(configuration_.run.seed), static_cast<std::uint64_t>(step),
                           own_.begin + 1, settings_.stop);
  }
  kernels::SetRule rule = settings_.set_rule();
  if (settings_.holds_reward()) rule.diversity_weight = constraint_.diversity_weight();
  const std::vector<Judgement> judgements = judge_.judge(answers, rule, Judge::Timing::by_stage);
  log_drawn_.clear();
  std::size_t row = 0;
  for (std::size_t p = 0; p < answers.size(); ++p) {
    measures_.add(answers[p], judgements[p]);
    const AnswerIds& prompt = answers[p].prompt.ids;
    const PromptAdvantages& advantages = judgements[p].advantages;
    const double factor =
        settings_.weight * advantage_factor(settings_, advantages.counted) / static_cast<double>(settings_.prompts);
    for (std::size_t i = 0; i < answers[p].drawn.size(); ++i, ++row) {
      const AnswerIds& answer = answers[p].drawn[i];
      const auto to = present_.tokens.begin() + static_cast<std::ptrdiff_t>(row) * present_.longest;
      std::fill(to, to + present_.longest, 0u);
      std::copy(answer.begin(), answer.end(), std::copy(prompt.begin(), prompt.end(), to));
      present_.sizes[2 * row] = std::ssize(prompt);
      present_.sizes[2 * row + 1] = std::ssize(answer);
      present_.factors[row] = static_cast<float>(factor * advantages.advantages[i]);
      log_drawn_.push_back(answers[p].log_drawn[i]);
    }
  }
  if (!settings_.holds_reward()) return;
  AnswerMeasures drawn;
  for (std::size_t p = 0; p < answers.size(); ++p) drawn.add(answers[p], judgements[p]);
  drawn.sum_over(groups_);
  constraint_.observe(drawn.mean(AnswerMeasures::reward));
}

/// Determines the reward to keep constant, before the first step. Collective.
void PolychromicRun::begin_constraint() {
  if (settings_.hold_reward == HoldReward::target) return constraint_.begin(settings_.reward_target);
  parallel::note_phase("reward of the initial model");
  base_.trainer().transformer().complete_weights();  // on ranks without a prompt too: it may be collective
  AnswerMeasures measures;
  const std::int64_t batches = (kTargetAnswers - 1) / (settings_.prompts * settings_.samples) + 1;
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    std::vector<Prompt> prompts;
    for (std::int64_t number = own_.begin; number < own_.end; ++number)
      prompts.push_back(prompts_.training(batch, number));
    add_measures(measures, std::move(prompts), batch * settings_.prompts + own_.begin + 1, nullptr);
  }
  measures.sum_over(groups_);
  constraint_.begin(measures.mean(AnswerMeasures::reward));
  log::info("mean reward of answers of the initial model: {:.4f}; it is held", constraint_.target());
}

/// Rows of the answers in `present_`, with the weights of their first use.
std::vector<PolicyRow> PolychromicRun::rows() const {
  std::vector<PolicyRow> rows;
  for (std::size_t row = 0; row < present_.factors.size(); ++row) {
    const std::uint32_t* const text = present_.tokens.data() + row * static_cast<std::size_t>(present_.longest);
    const auto prompt = static_cast<std::size_t>(present_.sizes[2 * row]),
               answer = static_cast<std::size_t>(present_.sizes[2 * row + 1]);
    rows.push_back({.prompt = {text, prompt},
                    .answer = {text + prompt, answer},
                    .weights = std::vector<float>(answer, present_.factors[row])});
  }
  return rows;
}

/// Fills the batch, with the weights of each token in this step.
void PolychromicRun::weigh(bool first_use) {
  std::vector<PolicyRow> rows = this->rows();
  batch_.fill(rows);
  if (first_use && settings_.kl == 0) return;
  const run::Timers::Whole timed(base_.timers(), "policy forward");
  base_.trainer().transformer().complete_weights();
  batch_.score(base_.trainer().transformer());
  const std::vector<std::vector<float>> now = batch_.log_probabilities();
  std::vector<std::vector<float>> frozen;
  if (settings_.kl > 0) {
    batch_.score(judge_.transformer());
    frozen = batch_.log_probabilities();
  }
  const double share = settings_.kl / static_cast<double>(settings_.prompts * settings_.samples);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const float* const first = present_.first.data() + row * static_cast<std::size_t>(present_.longest);
    for (std::size_t t = 0; t < rows[row].weights.size(); ++t) {
      double weight = static_cast<double>(rows[row].weights[t]);
      if (!first_use) {
        const double ratio = std::exp(static_cast<double>(now[row][t]) - static_cast<double>(first[t]));
        const bool beyond = weight > 0 ? ratio > 1 + settings_.clip : ratio < 1 - settings_.clip;
        measures_.add(AnswerMeasures::clipped, beyond ? 1 : 0);
        weight = beyond ? 0 : weight * ratio;
      }
      if (settings_.kl > 0) {
        const double log_ratio = static_cast<double>(frozen[row][t]) - static_cast<double>(now[row][t]),
                     less = std::expm1(log_ratio);
        measures_.add(AnswerMeasures::divergence, less - log_ratio);
        weight += share * less;
      }
      rows[row].weights[t] = static_cast<float>(weight);
    }
  }
  batch_.fill(rows);
}

/// Stores the probabilities of the forward pass of the first use, which later uses compare with, and their difference
/// from those of generation: none in fp32, by the order of sums in other types.
void PolychromicRun::note_probabilities() {
  wait();
  const std::vector<std::vector<float>> trained = batch_.log_probabilities();
  for (std::size_t row = 0; row < trained.size(); ++row) {
    std::copy(trained[row].begin(), trained[row].end(),
              present_.first.begin() + static_cast<std::ptrdiff_t>(row) * present_.longest);
    for (std::size_t t = 0; t < trained[row].size(); ++t)
      measures_.add(AnswerMeasures::gap, std::abs(static_cast<double>(trained[row][t] - log_drawn_[row][t])));
  }
}

/// Answers as long as those of the present batch, in every batch.
std::vector<std::pair<std::string, double>> PolychromicRun::phase_bytes() {
  AnswerWork work{.prompts = own_.size(), .samples = settings_.samples};
  for (std::size_t row = 0; row < present_.factors.size(); ++row) {
    work.prompt_tokens += present_.sizes[2 * row];
    work.answer_tokens += present_.sizes[2 * row + 1];
  }
  const std::int64_t answers = std::max<std::int64_t>(1, work.prompts * work.samples);
  work.prompt_tokens /= answers;
  work.answer_tokens /= answers;
  work.drawn = 1 / static_cast<double>(settings_.every);
  for (const bool passes : {settings_.embedder.empty() || settings_.uses(RewardKind::likelihood),
                            settings_.uses(RewardKind::reference_likelihood)})
    if (passes) work.embedded += work.drawn;
  const auto uses = static_cast<double>(settings_.trains() ? std::min(settings_.epochs, settings_.every) : 0);
  work.trained = work.drawn * uses;
  work.scored = settings_.kl > 0 ? 2 * work.trained : std::max(0.0, work.trained - work.drawn);
  std::vector<std::pair<std::string, double>> bytes = base_.phase_bytes();
  const run::PhaseBytes of_answers = answer_bytes(work, configuration_, base_.trainer().model().architecture());
  bytes.insert(bytes.end(), of_answers.begin(), of_answers.end());
  return bytes;
}

run::Metrics PolychromicRun::metrics() {
  run::Metrics metrics = base_.metrics();
  measures_.sum_over(groups_);
  const run::Metrics of_answers = measures_.of_training();
  metrics.insert(metrics.end(), of_answers.begin(), of_answers.end());
  measures_ = {};
  if (settings_.holds_reward())
    metrics.push_back({.name = "answers.diversity_weight", .value = constraint_.diversity_weight(), .in_result = true});
  return metrics;
}

// --- Evaluation -----------------------------------------------------------------------------------------------------

/// Adds the measures of answers to prompts outside the steps. first: number of the first one in the keys of random
/// numbers. texts: receives the answers.
void PolychromicRun::add_measures(AnswerMeasures& measures, std::vector<Prompt> prompts, std::int64_t first,
                                  Json* texts) {
  const std::vector<Answers> answers =
      draw_answers(generator_, tokenizer_, std::move(prompts), settings_.samples,
                   static_cast<std::uint64_t>(configuration_.run.seed), 0, first, settings_.stop);
  const std::vector<Judgement> judgements = judge_.judge(answers, settings_.set_rule(), Judge::Timing::none);
  for (std::size_t p = 0; p < answers.size(); ++p) {
    measures.add(answers[p], judgements[p]);
    if (texts != nullptr) texts->push_back(shown(answers[p], judgements[p], tokenizer_));
  }
}

/// Measures answers to the evaluation prompts with the present weights; random numbers are the same every time.
/// samples: receives the answers to the first ones. Collective.
AnswerMeasures PolychromicRun::measure(Json* samples) {
  const parallel::Range own = parallel::part(prompts_.n_evaluation(), groups_.size(), groups_.rank());
  const std::int64_t at_once = largest_prompts(configuration_);
  AnswerMeasures measures;
  Json texts = Json::array();
  base_.trainer().transformer().complete_weights();  // on ranks without a prompt too: it may be collective
  for (std::int64_t begin = own.begin; begin < own.end; begin += at_once) {
    std::vector<Prompt> prompts;
    for (std::int64_t number = begin; number < std::min(begin + at_once, own.end); ++number)
      prompts.push_back(prompts_.evaluation(number));
    add_measures(measures, std::move(prompts), kEvaluationNumbers + begin, &texts);
  }
  measures.sum_over(groups_);
  if (samples != nullptr) {
    *samples = Json::array();
    for (const std::string& text : gather(json_text(texts), groups_))
      for (const Json& one : parse_json(text))
        if (std::ssize(*samples) < kShownPrompts) samples->push_back(one);
  }
  return measures;
}

/// JSON of measures and some answers. Collective.
Json PolychromicRun::record() {
  Json samples;
  Json json = measure(&samples).to_json();
  json["step"] = base_.trainer().steps_done();
  json["samples"] = samples;
  return json;
}

void PolychromicRun::write(const Json& json) const {
  if (world_.is_root()) storage::write_json(std::filesystem::path(configuration_.run.output) / kSamples, json);
}

void PolychromicRun::start() {
  base_.start();
  if (judge_.shares_weights()) judge_.transformer().prepare_weights();
  if (base_.trainer().steps_done() > 0) return;
  if (settings_.holds_reward()) begin_constraint();
  if (prompts_.n_evaluation() == 0) return;
  parallel::note_phase("answers before the training");
  write({{"before", record()}});
}

run::Metrics PolychromicRun::evaluate() {
  run::Metrics metrics = base_.evaluate();
  if (prompts_.n_evaluation() == 0) return metrics;
  const run::Metrics of_answers = measure(nullptr).of_evaluation();
  metrics.insert(metrics.end(), of_answers.begin(), of_answers.end());
  return metrics;
}

void PolychromicRun::conclude(Json& result) {
  base_.conclude(result);
  if (prompts_.n_evaluation() == 0) return;
  const Json after = record();
  const std::filesystem::path file = std::filesystem::path(configuration_.run.output) / kSamples;
  Json both = Json::object();
  if (world_.is_root()) {
    if (std::filesystem::exists(file)) {
      const storage::MappedFile text(file.string());
      const Json before = parse_json({reinterpret_cast<const char*>(text.bytes().data()), text.bytes().size()});
      if (before.is_object() && before.contains("before")) both["before"] = before["before"];
    }
    both["after"] = after;
  }
  write(both);
  result["answers"] = both;
  log::info("answers after step {}: diversity {}, distinct-2 {}, reward {}", base_.trainer().steps_done(),
            json_text(after["diversity"]), json_text(after["distinct_2"]), json_text(after["reward"]));
}

}  // namespace weft::polychromic

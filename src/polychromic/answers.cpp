// SPDX-License-Identifier: Apache-2.0
#include "polychromic/answers.hpp"

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "language_model/generation/growing_text.hpp"
#include "parallel/failure.hpp"
#include "storage/digest.hpp"

namespace weft::polychromic {

using namespace language_model;

GenerationSettings answer_settings(const Configuration& configuration, const Architecture& architecture,
                                   std::int64_t prompts, std::int64_t longest_prompt, std::int64_t most_rows) {
  const Settings& polychromic = configuration.polychromic;
  const std::int64_t all = prompts * polychromic.samples,
                     wanted = polychromic.draw_together == 0 ? all : std::min(all, polychromic.draw_together);
  return {.architecture = architecture,
          .type = activation_type(configuration),
          .rows = std::min(wanted, most_rows),
          .prompts = prompts,
          .longest_prompt = longest_prompt,
          .new_tokens = configuration.polychromic.max_new_tokens,
          .prefill_rows = configuration.micro_tokens(),
          .temperature = configuration.polychromic.temperature,
          .top_p = configuration.polychromic.top_p,
          .as_trained = true,
          .graphs = configuration.device.graphs};
}

std::vector<Answers> draw_answers(Generator& generator, const Tokenizer& tokenizer, std::vector<Prompt> prompts,
                                  std::int64_t samples, std::uint64_t seed, std::uint64_t step, std::int64_t first,
                                  std::span<const std::string> stops) {
  const std::vector<std::uint32_t> ends = end_symbols(tokenizer);
  std::vector<Answers> answers;
  for (Prompt& prompt : prompts) {
    Answers& of_prompt = answers.emplace_back();
    of_prompt.prompt = std::move(prompt);
    const auto count = static_cast<std::size_t>(samples);
    of_prompt.drawn.resize(count);
    of_prompt.ids.resize(count);
    of_prompt.ended.resize(count);
    of_prompt.log_drawn.resize(count);
  }
  std::vector<GenerationRequest> requests;
  for (std::size_t prompt = 0; prompt < answers.size(); ++prompt)
    for (std::int64_t sample = 0; sample < samples; ++sample)
      requests.push_back({.prompt = answers[prompt].prompt.ids,
                          .number = static_cast<std::uint32_t>(first + static_cast<std::int64_t>(prompt)),
                          .sample = static_cast<std::uint32_t>(sample)});
  std::vector<GrowingText> texts(requests.size(), GrowingText(tokenizer, stops, ends));
  generator.run(requests, seed, step, [&](std::size_t i, const kernels::Drawn& drawn) {
    const auto sample = i % static_cast<std::size_t>(samples);
    Answers& of_prompt = answers[i / static_cast<std::size_t>(samples)];
    of_prompt.drawn[sample].push_back(drawn.token);
    of_prompt.log_drawn[sample].push_back(drawn.log_drawn);
    AnswerIds& ids = of_prompt.ids[sample];
    const GrowingText::End end = texts[i].append(drawn.token);
    if (end != GrowingText::End::none) of_prompt.ended[sample] = 1;
    if (end != GrowingText::End::symbol) ids.push_back(drawn.token);
    if (end == GrowingText::End::stop)
      while (tokenizer.detokenise(ids, true).size() > texts[i].bytes()) ids.pop_back();
    return end == GrowingText::End::none;
  });
  return answers;
}

namespace {

std::vector<std::string> texts_of(const Answers& answers, const Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  for (const AnswerIds& ids : answers.ids) texts.push_back(valid_utf8(tokenizer.detokenise(ids, true)));
  return texts;
}

}  // namespace

std::vector<AnsweredPrompt> answered_prompts(std::span<const Answers> answers, const Tokenizer& tokenizer) {
  std::vector<AnsweredPrompt> prompts;
  for (const Answers& of_prompt : answers) {
    AnsweredPrompt& prompt = prompts.emplace_back();
    prompt.id = of_prompt.prompt.id;
    prompt.prompt = of_prompt.prompt.text;
    prompt.reference = of_prompt.prompt.reference;
    prompt.answer_ids = of_prompt.ids;
    prompt.answers = texts_of(of_prompt, tokenizer);
  }
  return prompts;
}

// --- Judge ----------------------------------------------------------------------------------------------------------

namespace {

std::unique_ptr<Reward> make_reward(const Settings& settings, RewardKind kind, const std::vector<double>* of_answers,
                                    const std::vector<double>* of_references) {
  switch (kind) {
    case RewardKind::constant:
      return constant_reward();
    case RewardKind::likelihood:
      return likelihood_reward(of_answers);
    case RewardKind::reference_likelihood:
      return likelihood_reward(of_references);
    case RewardKind::exact:
      return exact_match_reward();
    case RewardKind::regex:
      return regex_reward(settings.reward_pattern);
    case RewardKind::length:
      return length_reward(settings.reward_length);
    case RewardKind::file:
      return file_reward(settings.reward_file);
    case RewardKind::command:
      return command_reward(settings.reward_command, settings.reward_time_limit);
  }
  throw error(ExitCode::internal, "a reward without a function");
}

/// Null if the frozen model is that of the run without its adapters, or if nothing uses it.
std::unique_ptr<const Model> own_model(const Model& trained, const Configuration& configuration,
                                       const parallel::Grid& grid) {
  if (trained.architecture().lora.rank > 0 || !configuration.polychromic.uses_frozen_model()) return nullptr;
  return std::make_unique<const Model>(trained.architecture(), configuration.optimizer.state, grid.shape(),
                                       grid.world().rank(), trained.execution(), model::Moments::none);
}

}  // namespace

std::unique_ptr<Reward> make_reward(const Settings& settings, const std::vector<double>* of_answers,
                                    const std::vector<double>* of_references) {
  std::vector<WeightedReward> terms;
  for (const auto& [kind, weight] : settings.rewards())
    terms.push_back({make_reward(settings, kind, of_answers, of_references), weight});
  return sum_reward(std::move(terms));
}

void require_reward(const Settings& settings, const parallel::World& world) {
  world.on_root([&] { make_reward(settings); });
}

TransformerSettings Judge::forward_settings(const Configuration& configuration, const Architecture& architecture,
                                            const parallel::GridShape& grid, std::int64_t rank) {
  TransformerSettings settings = transformer_settings(configuration, architecture, grid, rank);
  settings.adapters = false;
  return embedding_settings(settings, configuration.micro_tokens());
}

Judge::Buffers::Buffers(const Configuration& configuration, const Architecture& architecture, std::int64_t answers,
                        model::StepArena& arena) {
  arena.purpose("diversity");
  const Settings& settings = configuration.polychromic;
  const std::int64_t width = settings.embedder.empty() ? architecture.model.d_model
                                                       : SentenceEncoder::size(settings.embedder).width,
                     samples = settings.samples, prompts = answers / samples;
  embeddings = {arena.take<float>(answers * width).data, answers, width, width};
  rewards = arena.take<double>(answers);
  workspace = arena.take<double>(kernels::set_advantages_workspace(prompts, samples));
  advantages = {arena.take<std::int64_t>(prompts), arena.take<double>(prompts), arena.take<double>(prompts),
                arena.take<double>(answers), arena.take<double>(answers)};
  host_rewards = arena.take_host<double>(answers);
  if (settings.semantic_weight > 0)
    host_embeddings = {arena.take_host<float>(answers * width).data, answers, width, width};
  host_advantages = {arena.take_host<std::int64_t>(prompts), arena.take_host<double>(prompts),
                     arena.take_host<double>(prompts), arena.take_host<double>(answers),
                     arena.take_host<double>(answers)};
}

namespace {

TransformerSettings frozen_settings(const Configuration& configuration, const Model& trained,
                                    const parallel::Grid& grid) {
  return Judge::forward_settings(configuration, trained.architecture(), grid.shape(), grid.world().rank());
}

}  // namespace

Judge::Judge(const Configuration& configuration, Trainer& trainer, const Tokenizer& tokenizer, std::int64_t answers,
             const InitialModel& initial, const parallel::World& world, const parallel::Grid& grid,
             const kernels::Execution& execution, run::Timers& timers, model::StepArena& arena)
    : settings_(configuration.polychromic),
      tokenizer_(tokenizer),
      execution_(execution),
      timers_(timers),
      copy_(grid.axis(parallel::kTensorAxis)),
      own_(own_model(trainer.model(), configuration, grid)),
      buffers_(configuration, trainer.model().architecture(), answers, arena),
      transformer_(own_ ? *own_ : trainer.model(), frozen_settings(configuration, trainer.model(), grid), timers, arena,
                   trainer.tensor()),
      staging_(frozen_settings(configuration, trainer.model(), grid).rows, false, execution, arena),
      embedder_(frozen_settings(configuration, trainer.model(), grid), transformer_, staging_, execution, arena,
                configuration.polychromic.embed_together, tokenizer.vocabulary_size()),
      reward_(make_reward(settings_, &log_probabilities_, &reference_log_probabilities_)) {
  if (!settings_.embedder.empty()) encoder_.emplace(settings_.embedder, execution);
  if (!own_) return;  // the weights of the run are not there yet
  initial.load(own_->parameters(), world, execution);
  transformer_.prepare_weights();
}

std::string Judge::digest() const {
  if (!own_ && !encoder_) return "";
  std::string digests = encoder_ ? encoder_->digest() : "";
  checkpoint::Registry registry;
  if (own_) own_->parameters().add_to(registry);
  std::string bytes;
  for (const checkpoint::Tensor& tensor : registry.tensors()) {
    bytes.resize(static_cast<std::size_t>(tensor.held.size() * tensor.row_bytes()));
    if (tensor.gather)
      tensor.gather(tensor.held, bytes.data());
    else
      device::copy(execution_, bytes.data(), tensor.data, std::ssize(bytes), device::Direction::to_host);
    kernels::fence(execution_);
    digests += storage::sha256(whole(std::move(bytes), tensor));
  }
  return storage::sha256(digests);
}

/// The bytes of a whole tensor from those that this rank holds: a digest is the same on any grid. Collective.
std::string Judge::whole(std::string held, const checkpoint::Tensor& tensor) const {
  if (tensor.held.size() == tensor.shape.front()) return held;
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(copy_.size()));
  const std::int64_t own = std::ssize(held);
  copy_.all_gather(&own, bytes.data(), sizeof own);
  std::string all(static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})), '\0');
  copy_.all_gather_uneven(held.data(), all.data(), bytes);
  return all;
}

void Judge::embed(std::span<const Answers> answers) {
  std::vector<AnswerIds> texts;  // prompt, answer, reference
  std::vector<EmbeddedText> rows, references;
  for (const Answers& of_prompt : answers)
    for (const AnswerIds& ids : of_prompt.ids) {
      AnswerIds& text = texts.emplace_back(of_prompt.prompt.ids);
      text.insert(text.end(), ids.begin(), ids.end());
      text.insert(text.end(), of_prompt.prompt.reference_ids.begin(), of_prompt.prompt.reference_ids.end());
    }
  std::size_t row = 0;
  for (const Answers& of_prompt : answers)
    for (std::size_t i = 0; i < of_prompt.ids.size(); ++i, ++row) {
      const std::size_t prompt = of_prompt.prompt.ids.size(), answer = prompt + of_prompt.ids[i].size();
      rows.push_back({std::span(texts[row]).first(answer), static_cast<std::int64_t>(prompt)});
      references.push_back({texts[row], static_cast<std::int64_t>(answer)});
    }
  if (settings_.uses(RewardKind::reference_likelihood)) {
    reference_log_probabilities_.resize(rows.size());
    embedder_.embed(references, {}, reference_log_probabilities_);
  }
  log_probabilities_.assign(rows.size(), 0.0);
  const kernels::Matrix<float> all = buffers_.embeddings,
                               embeddings = {all.data, std::ssize(rows), all.columns, all.stride};
  if (!encoder_) return embedder_.embed(rows, embeddings, log_probabilities_);
  std::vector<std::string> sentences;
  for (const Answers& of_prompt : answers)
    for (std::string& text : texts_of(of_prompt, tokenizer_)) sentences.push_back(std::move(text));
  encoder_->embed(sentences, embeddings);
  if (settings_.uses(RewardKind::likelihood)) embedder_.embed(rows, {}, log_probabilities_);
}

std::vector<std::vector<double>> Judge::scores(std::span<const Answers> answers) {
  const std::vector<AnsweredPrompt> prompts = answered_prompts(answers, tokenizer_);
  if (copy_.size() == 1) return reward_->scores(prompts);
  // A function of the user need not return the same twice.
  std::vector<std::vector<double>> scores;
  if (const auto failure = parallel::attempt_on_root(copy_, [&] { scores = reward_->scores(prompts); }))
    throw Error(failure->code, failure->message);  // other groups do not know it
  std::vector<double> all;
  for (const std::vector<double>& of_prompt : scores) all.insert(all.end(), of_prompt.begin(), of_prompt.end());
  all.resize(answers.size() * static_cast<std::size_t>(settings_.samples));
  copy_.broadcast(all.data(), std::ssize(all) * std::int64_t{sizeof(double)});
  scores.clear();
  for (auto from = all.begin(); from != all.end(); from += settings_.samples)
    scores.emplace_back(from, from + settings_.samples);
  return scores;
}

/// Distances between the answers to prompt p of the batch: those of their tokens, and semantic_weight times those of
/// their embeddings.
std::vector<double> Judge::token_distances(const Answers& answers, std::int64_t p) const {
  std::vector<double> distances = pair_distances(
      settings_.diversity == DiversityMeasure::distinct ? PairMetric::distinct : PairMetric::self_bleu, answers.ids);
  if (settings_.semantic_weight == 0) return distances;
  const kernels::Matrix<float>& all = buffers_.host_embeddings;
  const std::vector<double> semantic =
      cosine_distances({all.row(p * settings_.samples), settings_.samples, all.columns, all.stride});
  for (std::size_t pair = 0; pair < distances.size(); ++pair)
    distances[pair] += settings_.semantic_weight * semantic[pair];
  return distances;
}

std::vector<Judgement> Judge::judge(std::span<const Answers> answers, const kernels::SetRule& rule, Timing timing) {
  std::vector<Judgement> judgements(answers.size());
  if (answers.empty()) return judgements;
  std::optional<run::Timers::Whole> stage;
  const auto begin = [&](const char* name) {
    stage.reset();
    if (timing == Timing::by_stage) stage.emplace(timers_, name);
  };
  begin("embed");
  embed(answers);
  begin("reward");
  const std::vector<std::vector<double>> rewards = scores(answers);
  begin("diversity and advantage");
  const std::int64_t prompts = std::ssize(answers), samples = settings_.samples, count = prompts * samples;
  for (std::int64_t i = 0; i < count; ++i)
    buffers_.host_rewards[i] = rewards[static_cast<std::size_t>(i / samples)][static_cast<std::size_t>(i % samples)];
  device::copy(execution_, buffers_.rewards.data, buffers_.host_rewards.data, 8 * count, device::Direction::to_device);
  const auto first = []<class T>(kernels::Array<T> all, std::int64_t size) {
    return kernels::Array<T>{all.data, size};
  };
  const auto part = [&](const kernels::SetAdvantages& all) -> kernels::SetAdvantages {
    return {first(all.counts, prompts), first(all.diversity, prompts), first(all.objective, prompts),
            first(all.distances, count), first(all.advantages, count)};
  };
  const kernels::SetAdvantages result = part(buffers_.advantages), host = part(buffers_.host_advantages);
  kernels::set_advantages(execution_, rule,
                          {.prompts = prompts,
                           .samples = samples,
                           .embeddings = {buffers_.embeddings.data, kernels::Scalar::fp32, count,
                                          buffers_.embeddings.columns, buffers_.embeddings.stride},
                           .rewards = {buffers_.rewards.data, count}},
                          {buffers_.workspace.data, kernels::set_advantages_workspace(prompts, samples)}, result);
  const auto read = [&]<class T>(kernels::Array<T> to, kernels::Array<T> from) {
    device::copy(execution_, to.data, from.data, to.size * static_cast<std::int64_t>(sizeof(T)),
                 device::Direction::to_host);
  };
  read(host.counts, result.counts);
  read(host.diversity, result.diversity);
  read(host.objective, result.objective);
  read(host.distances, result.distances);
  read(host.advantages, result.advantages);
  if (settings_.semantic_weight > 0)
    device::copy(execution_, buffers_.host_embeddings.data, buffers_.embeddings.data,
                 count * buffers_.embeddings.columns * static_cast<std::int64_t>(sizeof(float)),
                 device::Direction::to_host);
  kernels::fence(execution_);
  for (std::int64_t p = 0; p < prompts; ++p) {
    const Answers& of_prompt = answers[static_cast<std::size_t>(p)];
    Judgement& judgement = judgements[static_cast<std::size_t>(p)];
    judgement.rewards = rewards[static_cast<std::size_t>(p)];
    judgement.semantic = host.diversity[p];
    judgement.text = text_diversity(of_prompt.ids);
    if (settings_.of_sets() && settings_.diversity == DiversityMeasure::semantic) {
      const auto values = [&](kernels::Array<double> all) {
        return std::vector<double>(all.data + p * samples, all.data + (p + 1) * samples);
      };
      judgement.advantages = {host.counts[p], host.diversity[p], host.objective[p], values(host.distances),
                              values(host.advantages)};
      continue;
    }
    std::vector<char> present;
    for (const AnswerIds& ids : of_prompt.ids) present.push_back(ids.empty() ? 0 : 1);
    if (settings_.of_sets()) {
      judgement.advantages = set_advantages(rule, judgement.rewards, token_distances(of_prompt, p), present);
      continue;
    }
    judgement.advantages = group_advantages(settings_.objective, settings_.standardise, judgement.rewards, present);
    judgement.advantages.diversity = host.diversity[p];
  }
  return judgements;
}

}  // namespace weft::polychromic

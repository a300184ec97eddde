// SPDX-License-Identifier: Apache-2.0
#include "privacy/account.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "privacy/sampling.hpp"

namespace weft::privacy {
namespace {

/// The result of `function` on rank 0, on every rank. Its failure is thrown on every rank.
template <class Function>
double from_root(const parallel::Communicator& ranks, Function&& function) {
  double value = 0;
  parallel::on_root(ranks, [&] { value = function(); });
  ranks.broadcast(&value, sizeof value);
  return value;
}

/// Adds steps of a kind: to the last phase if that is of this kind.
void append(std::vector<Phase>& history, const Phase& phase) {
  if (phase.steps == 0) return;
  if (!history.empty() && history.back().same_kind(phase))
    history.back().steps += phase.steps;
  else
    history.push_back(phase);
}

/// The key in checkpoints, and that of version 0.1, from which Philox drew. A key of one generator is never used by the
/// other.
constexpr const char* kKeyTensor = "privacy/chacha20_key";
constexpr const char* kPhiloxKeyTensor = "privacy/key";
/// The first key of a run with canaries or bands: a later key would choose other canaries and parts of the data.
constexpr const char* kFirstKeyTensor = "privacy/first_key";

/// Neighbouring relation: adding or removing one record, whose effect clipping bounds to C.
constexpr const char* kRelation = "add_or_remove";

/// Largest noise multiplier / (2 deviation of the count): the gradient then has 7 times the noise. At 1 it has infinite
/// noise.
constexpr double kMostCountPart = 0.99;

/// Deviation of the noise on the count of adaptive clipping.
double count_deviation(const Settings& settings, double expected) {
  return settings.count_noise > 0 ? settings.count_noise : expected / 20;
}

/// Text on the limits of the guarantee.
std::string limits(const Record& record, const std::string& initial) {
  std::string text;
  if (record.unit == Unit::token)
    text = "the tokens of a document are protected one by one, not together; the number of records";
  else if (record.unit == Unit::sequence)
    text =
        "a document that is cut into several records is protected piece by piece; the vocabulary, the number of "
        "records";
  else if (record.unit == Unit::owner)
    text = "all lines of an owner are protected together; the vocabulary, the number of owners and of their sequences";
  else
    text = fmt::format(
        "several {0}s of a person are protected one by one, not together; the vocabulary, the number of {0}s and of "
        "their sequences",
        name_of(record.unit));
  text += " and validation data are public";
  if (!initial.empty())
    text += fmt::format(
        "; the weights that training began with ({}) are not covered: they have the guarantee of their own training, "
        "if it was private, and if it used the same data, both epsilons add up",
        initial);
  return text;
}

}  // namespace

const char* name_of(Unit unit) {
  switch (unit) {
    case Unit::sequence:
      return "sequence";
    case Unit::document:
      return "document";
    case Unit::example:
      return "example";
    case Unit::owner:
      return "owner";
    case Unit::token:
      break;
  }
  return "token";
}

std::string to_text(const Record& record) {
  if (record.unit == Unit::sequence) return fmt::format("sequence of at most {} tokens", record.tokens);
  return name_of(record.unit);
}

Json to_json(const Guarantee& guarantee) {
  const Phase& last = guarantee.history.back();
  Json json = {{"epsilon", guarantee.epsilon},
               {"delta", guarantee.delta},
               {"noise_multiplier", last.noise_multiplier},
               {"sample_rate", last.sample_rate},
               {"steps", steps_of(guarantee.history)},
               {"accountant", name_of(guarantee.accountant)},
               {"clip", guarantee.clip},
               {"clipping", guarantee.adaptive ? "adaptive" : "fixed"},
               {"sampling", guarantee.most_records > 0 ? "truncated_poisson" : "poisson"},
               {"unit", name_of(guarantee.record.unit)},
               {"records", guarantee.record.count},
               {"relation", kRelation},
               {"protects", fmt::format("each {}, added or removed; {}", to_text(guarantee.record),
                                        limits(guarantee.record, guarantee.initial))},
               {"private", guarantee.key == KeySource::system}};
  if (guarantee.most_records > 0) json["most_records"] = guarantee.most_records;
  if (guarantee.bands > 1) json["bands"] = guarantee.bands;
  if (guarantee.history.size() > 1)
    for (const Phase& phase : guarantee.history)
      json["history"].push_back(
          {{"sample_rate", phase.sample_rate}, {"noise_multiplier", phase.noise_multiplier}, {"steps", phase.steps}});
  return json;
}

std::string to_text(const Guarantee& guarantee) {
  const std::string steps = fmt::format("{} steps", steps_of(guarantee.history));
  if (guarantee.key == KeySource::test)
    return fmt::format(
        "privacy: none, the noise follows from run.seed (privacy.noise_key = \"test\"); with a secret key "
        "{} give epsilon {:.4g} at delta {:g} ({})",
        steps, guarantee.epsilon, guarantee.delta, name_of(guarantee.accountant));
  return fmt::format("privacy: epsilon {:.4g} at delta {:g} ({}{}) after {}, for each {}, added or removed{}",
                     guarantee.epsilon, guarantee.delta, name_of(guarantee.accountant),
                     guarantee.accountant == AccountantKind::gdp ? ", an approximation" : "", steps,
                     to_text(guarantee.record),
                     guarantee.initial.empty() ? "" : "; without the weights that training began with");
}

void require_parts(const Settings& settings, double sample_rate) {
  const auto bands = static_cast<double>(settings.bands);
  if (bands * sample_rate <= 1) return;
  throw collective_error(
      ExitCode::usage,
      "privacy.bands = {} at a sample rate of {:.4g} (a step draws from one of {} parts of the data, "
      "which have fewer records than a step is to have); take at most {:g} bands, or smaller batches",
      settings.bands, sample_rate, settings.bands, std::floor(1 / sample_rate));
}

void require_count_noise(const Settings& settings, double multiplier, double expected) {
  const double deviation = count_deviation(settings, expected);
  if (!settings.adapts_clip() || multiplier < kMostCountPart * 2 * deviation) return;
  throw collective_error(ExitCode::usage,
                         "adaptive clipping needs more noise on its count than {:g} for a noise multiplier of {:g}; "
                         "raise privacy.count_noise to {:.3g} or more",
                         deviation, multiplier, multiplier);
}

Account::Account(const Settings& settings, double sample_rate, const Record& record, std::string initial)
    : settings_(settings), sample_rate_(sample_rate), record_(record), initial_(std::move(initial)) {
  require_parts(settings, sample_rate);
}

void Account::register_in(checkpoint::Registry& registry, bool writes) {
  const auto range = [&](std::size_t size) { return parallel::Range{0, static_cast<std::int64_t>(size)}; };
  registry.add({.name = "privacy/history",
                .type = kernels::Scalar::fp64,
                .shape = {static_cast<std::int64_t>(kMostPhases), 3},
                .held = range(kMostPhases),
                .owned = range(writes ? kMostPhases : 0),
                .data = phases_.data()});
  const auto add_key = [&](const char* name, kernels::NoiseKey& key) {
    registry.add({.name = name,
                  .type = kernels::Scalar::u32,
                  .shape = {static_cast<std::int64_t>(key.size())},
                  .held = range(key.size()),
                  .owned = range(writes ? key.size() : 0),
                  .data = key.data()});
    registry.make_secret(name);
  };
  add_key(kKeyTensor, key_);
  if (settings_.canaries > 0 || settings_.bands > 1) add_key(kFirstKeyTensor, first_key_);
  // A checkpoint of another generator has another tensor, or none: `resume` then makes a key.
  registry.make_optional(kKeyTensor);
  registry.make_optional(kPhiloxKeyTensor);
}

std::vector<Phase> Account::history() const {
  std::vector<Phase> history;
  for (const StoredPhase& phase : phases_)
    if (phase.noise_multiplier > 0)
      history.push_back({phase.sample_rate, phase.noise_multiplier, static_cast<std::int64_t>(phase.steps)});
  return history;
}

std::vector<Phase> Account::planned(std::int64_t more) const {
  std::vector<Phase> all = history();
  append(all, {sample_rate_, noise_multiplier_, more});
  return all;
}

double Account::noise_for_target(std::int64_t more) const {
  const Phase next{sample_rate_, 1, more};
  const Phase counted = as_independent({&next, 1}, settings_.bands).front();
  return calibrate(settings_.accountant, settings_.epsilon, settings_.delta, counted.sample_rate, counted.steps,
                   as_independent(history(), settings_.bands), truncation());
}

void Account::plan(std::int64_t done, std::int64_t steps, const parallel::Communicator& ranks) {
  const std::int64_t more = std::max<std::int64_t>(0, steps - done);
  const double reached = from_root(ranks, [&] { return epsilon_of(planned(more)); });
  noise(sample_rate_ * static_cast<double>(record_.count));  // throws where its parts do not fit
  log::info(
      "privacy: noise multiplier {:.6g}{}, sample rate {:.4g}, {} records: epsilon {:.4g} at delta {:g} ({}) after {} "
      "steps, for each {}; {}",
      noise_multiplier_, settings_.bands > 1 ? fmt::format(" in {} bands", settings_.bands) : "", sample_rate_,
      record_.count, reached, settings_.delta, name_of(settings_.accountant), done + more, to_text(record_),
      limits(record_, initial_));
  if (record_.count > 0 && settings_.delta * static_cast<double>(record_.count) >= 1)
    log::warning("privacy.delta = {:g} is not less than 1 / {} records: publishing a random record would satisfy it",
                 settings_.delta, record_.count);
  if (settings_.accountant == AccountantKind::gdp)
    log::warning("privacy.accountant = \"gdp\" is an approximation: the true epsilon may be larger");
  if (settings_.noise_key == KeySource::test)
    log::warning("privacy.noise_key = \"test\": the noise follows from run.seed; this run is not private");
}

void Account::make_key(std::uint64_t seed, std::int64_t done, const parallel::Communicator& ranks) {
  parallel::on_root(ranks, [&] { key_ = new_noise_key(settings_.noise_key, seed, static_cast<std::uint64_t>(done)); });
  ranks.broadcast(key_.data(), sizeof key_);
}

void Account::begin(std::uint64_t seed, std::int64_t steps, const parallel::Communicator& ranks) {
  make_key(seed, 0, ranks);
  first_key_ = key_;
  phases_ = {};
  parallel::note_phase("computing the noise multiplier");
  noise_multiplier_ = settings_.noise_multiplier > 0 ? settings_.noise_multiplier
                                                     : from_root(ranks, [&] { return noise_for_target(steps); });
  plan(0, steps, ranks);
}

void Account::resume(std::uint64_t seed, std::int64_t done, std::int64_t steps, bool changed,
                     const parallel::Communicator& ranks) {
  const auto is_usable = [](const StoredPhase& phase) {
    return phase.sample_rate >= 0 && phase.sample_rate <= 1 && phase.noise_multiplier > 0 &&
           std::isfinite(phase.noise_multiplier) && phase.steps >= 1 && phase.steps <= 1e15;
  };
  std::size_t used = 0;
  while (used < kMostPhases && is_usable(phases_[used])) ++used;
  for (std::size_t i = used; i < kMostPhases; ++i)
    if (phases_[i].noise_multiplier != 0 || phases_[i].steps != 0)
      throw collective_error(ExitCode::io,
                             "the checkpoint's tensor \"privacy/history\" is not an account of steps (row {}); resume "
                             "from another checkpoint",
                             i);
  const std::vector<Phase> before = history();
  if (steps_of(before) != done)
    throw collective_error(ExitCode::io,
                           "the checkpoint of step {} accounts for {} private steps (its tensor \"privacy/history\"); "
                           "resume from another checkpoint",
                           done, steps_of(before));
  parallel::note_phase("computing the noise multiplier");
  const std::int64_t more = std::max<std::int64_t>(0, steps - done);
  noise_multiplier_ = settings_.noise_multiplier > 0 ? settings_.noise_multiplier
                      : before.empty()               ? 0
                                                     : before.back().noise_multiplier;
  if (settings_.epsilon > 0)
    noise_multiplier_ = from_root(ranks, [&] {
      if (noise_multiplier_ > 0 && epsilon_of(planned(more)) <= settings_.epsilon) return noise_multiplier_;
      return noise_for_target(more);
    });
  if (settings_.bands > 1 && !before.empty())  // the condition of as_independent, whatever calibration finds
    noise_multiplier_ = std::max(noise_multiplier_, before.back().noise_multiplier);
  const Phase next{sample_rate_, noise_multiplier_, 1};
  const bool has_key = key_ != kernels::NoiseKey{};
  if (!has_key || changed || (!before.empty() && !before.back().same_kind(next))) {
    log::info("privacy: {}; the steps from here on draw noise and records from a new key",
              has_key ? "these steps are others than planned"
                      : "the checkpoint has no key of ChaCha20 (an earlier version of the program wrote it)");
    make_key(seed, done, ranks);
  }
  plan(done, steps, ranks);
}

std::vector<std::int64_t> Account::draw(std::int64_t step, const parallel::Communicator& data_ranks) const {
  const std::vector<std::int64_t> drawn = draw(step);
  const parallel::Range own = parallel::part(std::ssize(drawn), data_ranks.size(), data_ranks.rank());
  return {drawn.begin() + own.begin, drawn.begin() + own.end};
}

std::vector<std::int64_t> Account::draw(std::int64_t step) const {
  const std::int64_t bands = settings_.bands;
  std::vector<std::int64_t> drawn =
      poisson_sample(key_, static_cast<std::uint64_t>(step), record_.count, static_cast<double>(bands) * sample_rate_);
  if (bands > 1)
    std::erase_if(drawn, [&](std::int64_t record) { return part_of(first_key_, record, bands) != step % bands; });
  std::erase_if(drawn, [coins = canaries(), first = record_.count - settings_.canaries](std::int64_t record) {
    return record >= first && !coins[static_cast<std::size_t>(record - first)];
  });
  if (settings_.truncates()) truncate_sample(key_, static_cast<std::uint64_t>(step), settings_.most_records, drawn);
  return drawn;
}

/// With adaptive clipping a step releases the sum with noise z' C and the count, to which a record adds 1/2, with noise
/// s: together a Gaussian mechanism of the noise multiplier z if 1/z^2 = 1/z'^2 + 1/(2 s)^2 (Andrew et al. 2021).
Noise Account::noise(double expected) const {
  Noise noise{.key = key_, .multiplier = noise_multiplier_, .expected = expected};
  if (!settings_.adapts_clip()) return noise;
  require_count_noise(settings_, noise_multiplier_, expected);
  noise.count_deviation = count_deviation(settings_, expected);
  const double part = noise_multiplier_ / (2 * noise.count_deviation);
  noise.multiplier /= std::sqrt(1 - part * part);
  return noise;
}

void Account::count_step() {
  std::vector<Phase> all = planned(1);
  if (all.size() > kMostPhases)
    throw collective_error(
        ExitCode::usage,
        "the noise or the sample rate of this run has changed {} times (a checkpoint holds no more); "
        "start a new run",
        kMostPhases);
  const Phase& last = all.back();
  phases_[all.size() - 1] = {last.sample_rate, last.noise_multiplier, static_cast<double>(last.steps)};
}

Guarantee Account::guarantee(const parallel::Communicator& ranks, std::int64_t more) const {
  Guarantee guarantee{.delta = settings_.delta,
                      .accountant = settings_.accountant,
                      .clip = settings_.clip,
                      .adaptive = settings_.adapts_clip(),
                      .most_records = truncation().most,
                      .bands = settings_.bands,
                      .key = settings_.noise_key,
                      .record = record_,
                      .initial = initial_,
                      .history = more > 0 ? planned(more) : history()};
  guarantee.epsilon = from_root(ranks, [&] { return epsilon_of(guarantee.history); });
  if (guarantee.history.empty()) guarantee.history.push_back({sample_rate_, noise_multiplier_, 0});
  return guarantee;
}

}  // namespace weft::privacy

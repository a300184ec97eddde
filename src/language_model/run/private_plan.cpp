// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/private_plan.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/random.hpp"
#include "language_model/run/planned_bytes.hpp"
#include "privacy/mode_choice.hpp"

namespace weft::language_model {
namespace {

/// Random windows of a text are drawn with step 0.
constexpr std::uint64_t kCanaryStep = 1;

privacy::ModeChoice mode_choice(const Configuration& configuration, const Architecture& architecture,
                                const parallel::GridShape& grid, kernels::Backend backend) {
  privacy::ModeChoice choice;
  Configuration with = configuration;
  for (const privacy::Mode mode : {privacy::Mode::materialise, privacy::Mode::book_keeping, privacy::Mode::two_pass}) {
    with.privacy.mode = mode;
    choice.bytes.emplace_back(mode, device_bytes(with, architecture, grid, backend));
  }
  if (configuration.device.memory > 0) {
    choice.limit = static_cast<std::int64_t>(1e9 * configuration.device.memory);
    choice.reason = "the first that fits device.memory";
  } else {
    with.privacy.enabled = false;
    choice.limit = 2 * device_bytes(with, architecture, grid, backend);
    choice.reason = "the first that at most doubles the memory";
  }
  return choice;
}

}  // namespace

PrivateRecords private_records(const Configuration& configuration, const dataset::TokenSet& train) {
  const privacy::Settings& settings = configuration.privacy;
  if (!settings.joins_sequences()) return private_records(configuration, train.size());
  using Grouping = dataset::DocumentRecords::Grouping;
  dataset::DocumentRecords documents(
      train, settings.unit == privacy::Unit::owner ? Grouping::by_owner : Grouping::by_document,
      configuration.data.sequence, settings.max_per_owner, static_cast<std::uint64_t>(configuration.run.seed));
  const std::int64_t of_data = documents.count(), count = of_data + settings.canaries,
                     all = documents.sequences() + settings.canaries;
  const double sequences =
      static_cast<double>(configuration.data.batch_tokens) / static_cast<double>(configuration.data.sequence);
  if (sequences > static_cast<double>(all))
    throw collective_error(ExitCode::usage,
                           "data.batch_tokens = {} asks for {:g} sequences per step, the {} records of the training "
                           "data have {}; take fewer tokens per step",
                           configuration.data.batch_tokens, sequences, count, all);
  return {count, of_data, configuration.data.sequence,
          sequences * static_cast<double>(count) / static_cast<double>(all), std::move(documents)};
}

PrivateRecords private_records(const Configuration& configuration, std::int64_t train_tokens) {
  const std::int64_t of_data = dataset::disjoint_windows(train_tokens, configuration.data.sequence);
  const PrivateRecords records{
      .count = of_data + configuration.privacy.canaries,
      .of_data = of_data,
      .length = configuration.data.sequence,
      .expected = static_cast<double>(configuration.data.batch_tokens / configuration.data.sequence),
      .documents = {}};
  if (records.rate() > 1)
    throw collective_error(ExitCode::usage,
                           "data.batch_tokens = {} asks for {} records per step, the training data have {} of {} ids; "
                           "take fewer tokens per step, or shorter sequences",
                           configuration.data.batch_tokens, records.expected, records.count,
                           configuration.data.sequence + 1);
  return records;
}

dataset::TokenSet canaries(const Configuration& configuration, std::int64_t vocabulary) {
  std::vector<std::uint32_t> ids;
  for (std::int64_t i = 0; i <= configuration.privacy.canaries * configuration.data.sequence; ++i)
    ids.push_back(static_cast<std::uint32_t>(kernels::uniform_below(
        kernels::philox(static_cast<std::uint64_t>(configuration.run.seed), kernels::Purpose::token_window, kCanaryStep,
                        static_cast<std::uint64_t>(i)),
        static_cast<std::uint64_t>(vocabulary))));
  return {"canaries", std::move(ids), vocabulary, 0};
}

void require_whole_records(const Configuration& configuration) {
  const privacy::Settings& settings = configuration.privacy;
  const std::int64_t needed = settings.max_per_owner * configuration.data.sequence, rank = configuration.rank_tokens();
  if (!settings.enabled || !settings.joins_sequences() || needed <= configuration.micro_tokens()) return;
  throw collective_error(ExitCode::usage,
                         "privacy.max_per_owner = {} sequences of {} tokens do not fit a micro-batch of {} tokens (the "
                         "gradient of a record is formed in one); {} a smaller privacy.max_per_owner",
                         settings.max_per_owner, configuration.data.sequence, configuration.micro_tokens(),
                         needed <= rank
                             ? fmt::format("give data.micro_tokens = {} or more, or", needed)
                             : fmt::format("a rank has at most {} tokens per step: take fewer ranks, a larger "
                                           "data.batch_tokens, or",
                                           rank));
}

void private_step(Trainer& trainer, const PrivateRecords& all, const dataset::TokenSet& train,
                  std::span<const std::int64_t> records) {
  std::vector<dataset::DocumentRecords::Sequence> sequences;
  std::vector<std::int64_t> counts;
  for (const std::int64_t record : records) {
    const std::size_t before = sequences.size();
    if (record >= all.of_data) {
      sequences.push_back({train.size() + (record - all.of_data) * all.length, all.length});
    } else if (all.documents) {
      const std::span<const dataset::DocumentRecords::Sequence> of_record = all.documents->of(record);
      sequences.insert(sequences.end(), of_record.begin(), of_record.end());
    } else {
      sequences.push_back(dataset::disjoint_window(train.size(), all.length, record));
    }
    counts.push_back(static_cast<std::int64_t>(sequences.size() - before));
  }
  trainer.private_step(counts, [&](std::int64_t first, dataset::TokenBatch& batch) {
    const auto part =
        std::span(sequences).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(batch.sequences));
    dataset::fill_sequences(train, part, batch, all.canaries ? &*all.canaries : nullptr);
  });
}

double steps_per_epoch(const Configuration& configuration, const dataset::Segments& train) {
  if (configuration.privacy.enabled) return 1 / private_records(configuration, train.set()).rate();
  return static_cast<double>(dataset::epoch_tokens(train, configuration.data)) /
         static_cast<double>(configuration.data.batch_tokens);
}

Configuration with_clipping_mode(Configuration configuration, const Architecture& architecture,
                                 const parallel::GridShape& grid, kernels::Backend backend) {
  privacy::Settings& settings = configuration.privacy;
  if (settings.enabled && settings.mode == privacy::Mode::automatic && settings.algorithm != privacy::Algorithm::naive)
    settings.mode = mode_choice(configuration, architecture, grid, backend).chosen();
  return configuration;
}

std::string clipping_text(const Configuration& configuration, const Architecture& architecture,
                          const parallel::GridShape& grid, kernels::Backend backend) {
  return mode_choice(configuration, architecture, grid, backend).text(configuration.privacy);
}

}  // namespace weft::language_model

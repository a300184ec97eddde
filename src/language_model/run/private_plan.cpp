// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/private_plan.hpp"

#include "base/error.hpp"
#include "language_model/run/planned_bytes.hpp"
#include "privacy/mode_choice.hpp"

namespace weft::language_model {
namespace {

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

std::optional<dataset::DocumentRecords> document_records(const Configuration& configuration,
                                                         const dataset::TokenSet& train) {
  if (!configuration.privacy.joins_sequences()) return {};
  const std::int64_t length = configuration.data.sequence;
  return std::optional<dataset::DocumentRecords>(std::in_place, train, length, configuration.micro_tokens() / length,
                                                 static_cast<std::uint64_t>(configuration.run.seed));
}

PrivateRecords private_records(const Configuration& configuration, const dataset::TokenSet& train) {
  const std::optional<dataset::DocumentRecords> documents = document_records(configuration, train);
  if (!documents) return private_records(configuration, train.size());
  const double sequences =
      static_cast<double>(configuration.data.batch_tokens) / static_cast<double>(configuration.data.sequence);
  const PrivateRecords records{
      .count = documents->count(),
      .expected = sequences * static_cast<double>(documents->count()) / static_cast<double>(documents->sequences())};
  if (records.rate() > 1)
    throw collective_error(ExitCode::usage,
                           "data.batch_tokens = {} asks for {:g} sequences per step, the {} records of the training "
                           "data have {}; take fewer tokens per step",
                           configuration.data.batch_tokens, sequences, documents->count(), documents->sequences());
  return records;
}

PrivateRecords private_records(const Configuration& configuration, std::int64_t train_tokens) {
  const PrivateRecords records{
      .count = dataset::disjoint_windows(train_tokens, configuration.data.sequence),
      .expected = static_cast<double>(configuration.data.batch_tokens / configuration.data.sequence)};
  if (records.rate() > 1)
    throw collective_error(ExitCode::usage,
                           "data.batch_tokens = {} asks for {} records per step, the training data have {} of {} ids; "
                           "take fewer tokens per step, or shorter sequences",
                           configuration.data.batch_tokens, records.expected, records.count,
                           configuration.data.sequence + 1);
  return records;
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

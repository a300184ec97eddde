// SPDX-License-Identifier: Apache-2.0
#include "transcoder/private/records.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace weft::transcoder {

RecordTable::RecordTable(const dataset::Description& data, std::int64_t record_rows) : record_rows_(record_rows) {
  first_.push_back(0);
  for (const dataset::FileDescription& file : data.files) {
    rows_.push_back(file.rows);
    first_.push_back(first_.back() + (file.rows + record_rows - 1) / record_rows);
  }
}

RecordTable::Rows RecordTable::rows_of(std::int64_t record) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), record);
  const auto file = static_cast<std::size_t>(after - first_.begin()) - 1;
  const std::int64_t begin = (record - first_[file]) * record_rows_;
  return {static_cast<std::int64_t>(file), begin, std::min(record_rows_, rows_[file] - begin)};
}

double expected_records(const Configuration& configuration) {
  return static_cast<double>(configuration.data.batch_tokens / record_rows(configuration));
}

double sample_rate(const Configuration& configuration, const RecordTable& records) {
  const double expected = expected_records(configuration), rate = expected / static_cast<double>(records.count());
  if (rate > 1)
    throw collective_error(
        ExitCode::usage,
        "data.batch_tokens = {} asks for {} records per step, the training data have {}; take fewer tokens per step",
        configuration.data.batch_tokens, expected, records.count());
  return rate;
}

Configuration with_largest_batch(const Configuration& configuration, std::int64_t n_records, std::int64_t ranks) {
  // Bernstein's inequality: of a binomial number with mean m, Pr[more than m + t] < exp(-t^2 / (2 (m + t / 3))).
  const double expected = expected_records(configuration);
  auto records = static_cast<std::int64_t>(std::ceil(expected + 10 * std::sqrt(expected) + 24));
  if (configuration.privacy.truncates()) records = configuration.privacy.most_records;
  if (n_records > 0) records = std::min(records, n_records);
  Configuration largest = configuration;
  largest.data.batch_tokens = std::max({records * record_rows(configuration), configuration.data.batch_tokens, ranks});
  return largest;
}

}  // namespace weft::transcoder

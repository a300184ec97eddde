// SPDX-License-Identifier: Apache-2.0
#include "transcoder/private/records.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace weft::transcoder {
namespace {

/// Default number of rows of a micro-batch: products are then large enough for the dense library.
constexpr std::int64_t kMicroRows = 512;

}  // namespace

void require_private_grid(const parallel::GridShape& grid) {
  if (grid.size(parallel::kFeatureAxis) == 1) return;
  throw collective_error(ExitCode::usage,
                         "private training on a grid of {} (the norm of a record's gradient is formed on one rank, "
                         "which needs all features); take parallel.data = {}",
                         grid.text(), grid.ranks());
}

std::int64_t private_micro_rows(const Configuration& configuration) {
  const std::int64_t of_record = record_rows(configuration), given = configuration.data.micro_tokens;
  const std::int64_t rows = given > 0 ? given : std::min(kMicroRows, configuration.data.batch_tokens);
  return std::max<std::int64_t>(1, rows / of_record) * of_record;
}

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

privacy::ClippingShape clipping_shape(const Configuration& configuration, const Shape& shape) {
  const std::int64_t rows = private_micro_rows(configuration), of_record = record_rows(configuration);
  privacy::ClippingShape clipping{.examples = {.examples = rows / of_record, .most_rows = of_record, .rows = rows}};
  // Elements of the inputs and output gradients of encoder and decoder.
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    clipping.kept_columns += shape.d_model + shape.decoder_columns(s) + 2 * shape.n_features;
  return clipping;
}

Shape private_shape(Shape shape) {
  shape.vectors_everywhere = true;
  return shape;
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Private training of transcoders: its records, and the sizes that follow from the settings.
//
// A record is a row of the activations (privacy.unit = "token"), or privacy.record_rows consecutive rows ("sequence").
// Its loss is the loss of its rows alone:
//
//   loss_b = sum over its rows n, layers and dimensions of (y^ - y)^2 / divisor     divisor: transcoder.error_reduction
//                                                                                   of record_rows tokens
//
// so that the mean over records is the mean over tokens of a step without privacy. Nothing may couple records, and
// nothing may follow from the training data but the noisy sum: normalisation and measures come from the validation
// data, which are public.
#pragma once

#include <cstdint>
#include <vector>

#include "dataset/activations/description.hpp"
#include "privacy/clipping_plan.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::transcoder {

/// Throws a collective Error(usage) for a grid with a feature axis: the norm of a record's gradient is formed on one
/// rank.
void require_private_grid(const parallel::GridShape&);

/// Rows of a micro-batch, a multiple of record_rows: data.micro_tokens, or a default.
std::int64_t private_micro_rows(const Configuration&);

/// The records of a dataset, in stored order. A record lies in one file; the last one of a file may have fewer rows.
struct RecordTable {
  RecordTable(const dataset::Description&, std::int64_t record_rows);

  struct Rows {
    std::int64_t file = 0, begin = 0, count = 0;
  };
  Rows rows_of(std::int64_t record) const;
  std::int64_t count() const { return first_.back(); }

 private:
  std::vector<std::int64_t> rows_;   // by file
  std::vector<std::int64_t> first_;  // by file: its first record; then the number of all
  std::int64_t record_rows_;
};

/// Records of a step, on average.
double expected_records(const Configuration&);
/// The probability with which each joins a step. Throws a collective Error(usage) if steps would have more records than
/// there are.
double sample_rate(const Configuration&, const RecordTable&);

privacy::ClippingShape clipping_shape(const Configuration&, const Shape&);
/// The shape of a model whose encoder biases and thresholds every rank updates.
Shape private_shape(Shape);

}  // namespace weft::transcoder

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
// so that the mean over records is the mean over tokens of a step without privacy. No operation may couple records, and
// only the noisy sum may depend on the training data: normalisation and measures come from the validation
// data, which are public.
#pragma once

#include <cstdint>
#include <vector>

#include "dataset/activations/description.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// The records of a dataset, in stored order. A record lies in one file; the last one of a file may have fewer rows.
struct RecordTable {
  RecordTable(const dataset::Description&, std::int64_t record_rows);

  struct Rows {
    std::int64_t file = 0, begin = 0, count = 0;
  };
  Rows rows_of(std::int64_t record) const;
  std::int64_t count() const { return first_.back(); }

 private:
  std::vector<std::int64_t> rows_;   // rows of each file
  std::vector<std::int64_t> first_;  // first record of each file; then the number of all records
  std::int64_t record_rows_;
};

/// Expected number of records of a step.
double expected_records(const Configuration&);
/// Probability with which each record is part of a step. Throws a collective Error(usage) if steps would have more
/// records than there are.
double sample_rate(const Configuration&, const RecordTable&);

/// Returns the configuration of the steps of a private run, in which data.batch_tokens is the number of rows for which
/// memory is taken: those of privacy.most_records, or of so many records that a step has more with a probability below
/// 1e-20. n_records: those of the data, 0: not known. A step has at least one row per rank (of no record, if need be).
Configuration with_largest_batch(const Configuration&, std::int64_t n_records, std::int64_t ranks);

}  // namespace weft::transcoder

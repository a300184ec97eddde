// SPDX-License-Identifier: Apache-2.0
//
// The lowest validation loss of a run so far: part of its state, in the manifest of every checkpoint (`extra`, "best").
// A resumed run therefore keeps, replaces and ends as an undisturbed one (checkpoint.keep_best, run.stop_after).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "checkpoint/manifest.hpp"
#include "storage/json_file.hpp"

namespace weft::checkpoint {

struct Best {
  std::int64_t step = -1;  ///< of the evaluation with the lowest loss; -1: there was none
  double loss = std::numeric_limits<double>::infinity();
  std::int64_t evaluations_since = 0;  ///< evaluations after it

  /// Counts an evaluation. True if its loss is the lowest so far; one that is not a number never is.
  bool note(std::int64_t step_of_evaluation, double its_loss);
};

/// The value of "best" in Manifest::extra, and back; nothing if there is none.
Json to_json(const Best&);
std::optional<Best> best_of(const Manifest&);

}  // namespace weft::checkpoint

// SPDX-License-Identifier: Apache-2.0
//
// What a run directory says about its run, for the page of `weft report`. Everything is read, nothing changed: the run
// may still be going on. Files are not trusted: texts are bounded before they are read, what grows with the length of a
// run is thinned while it streams by, and a number from a file sizes nothing unless it was held against the bytes that
// are there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/resume.hpp"
#include "parallel/world.hpp"
#include "report/json.hpp"

namespace weft::commands {

/// The curves of metrics.jsonl. Values are NaN where a record has none or one that is not finite. Longer files are
/// thinned: a point is then the mean of `records_per_point` records, edges their extremes.
struct Course {
  std::vector<double> step;
  std::vector<double> loss, learning_rate, gradient_norm, tokens_per_second;
  std::vector<double> dead_percent;
  std::vector<double> nmse, nmse_low, nmse_high;  ///< standardised: mean over layers, best and worst layer
  std::vector<double> l0, l0_low, l0_high;
  std::int64_t records = 0;            ///< lines read
  std::int64_t unreadable = 0;         ///< lines that are no record
  std::int64_t not_finite = 0;         ///< records whose loss is not finite
  std::int64_t records_per_point = 1;  ///< at most

  double last_step() const { return step.empty() ? 0 : step.back(); }
};
/// An empty course when the file is not there.
Course read_course(const std::filesystem::path& metrics);

/// One start of the run, from starts.jsonl.
struct StartFact {
  std::int64_t begin = 0;
  std::int64_t end = -1;  ///< -1: it ended without a word
};
std::vector<StartFact> read_starts(const std::filesystem::path& starts);

/// A checkpoint as its manifest describes it; shards are not opened.
struct CheckpointFact {
  std::int64_t step = 0;
  std::int64_t bytes = 0;
  std::string grid;     ///< that wrote it: "data 1 x feature 4"
  std::string written;  ///< UTC
  std::string problem;  ///< why its manifest cannot be used; "": it can
};

/// How strongly the features of layer s write to layer t, from the decoder weights of a checkpoint.
struct DecoderMass {
  std::int64_t step = 0;
  std::vector<std::int64_t> features;          ///< by source layer: features that count
  std::vector<std::int64_t> all_features;      ///< by source layer
  std::vector<std::vector<double>> magnitude;  ///< [s][t]: root of the mean squared norm of w_f^{s->t}; NaN for t < s
  std::vector<std::vector<double>> share;  ///< [s][t]: part of the squared norm of layer s's features; rows add to 1
  std::string problem;                     ///< why there is none; "": there is
};
/// Features count that fired within the last `dead_window` tokens, 0 = at any time. Read in pieces of a few MiB. The
/// checkpoint's shards must have been verified. Throws Error.
DecoderMass decoder_mass(const checkpoint::Found&, std::int64_t dead_window);

struct RunFacts {
  std::filesystem::path path;
  report::Json record;      ///< run.json
  report::Json benchmark;   ///< benchmark.json beside it; null: none
  report::Json evaluation;  ///< evaluation.json beside it; null: none
  std::string input;        ///< input.toml; "" = none
  Course course;
  std::vector<StartFact> starts;
  std::vector<CheckpointFact> checkpoints;  ///< the newest ones, ascending
  std::int64_t checkpoints_kept = 0;        ///< all of them
  DecoderMass mass;
  std::vector<std::string> notes;  ///< files that could not be used, and why
};

/// Collective; the facts are on rank 0. Throws a collective Error(usage) when `path` is no run directory, and
/// Error(data) when its run.json is no record of a run.
RunFacts gather_facts(const std::filesystem::path& path, const parallel::World&);

/// The member at the end of a path of names; null when it is not there.
const report::Json& member(const report::Json&, std::initializer_list<const char*> names);
/// A finite number of sane size, else NaN.
double number(const report::Json&);

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// Mean and standard deviation of every dimension, and mean norm of every layer, in one streaming pass in fp64 (Chan,
// Golub, LeVeque 1983: m += delta * n_b / n; M2 += M2_b + delta^2 * n_a * n_b / n). The order of the merges depends on
// the dataset alone, so results are bitwise equal for any number of ranks and threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/dataset_settings.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

/// Statistics of inputs or of targets.
struct SideStatistics {
  std::vector<double> mean;                ///< [n_layers * d_model]
  std::vector<double> standard_deviation;  ///< [n_layers * d_model], divisor n - 1; 0 for one row
  std::vector<double> mean_norm;           ///< [n_layers] mean over rows of the Euclidean norm
};

struct Statistics {
  std::int64_t n_rows = 0;
  SideStatistics inputs;
  SideStatistics targets;
};

/// Statistics of the first n_rows rows in stored order; of all rows if n_rows is 0 or more than there are. Each row is
/// read once, by one rank.
/// Collective. Throws Error(data), known to all ranks, with file, dataset and row of the first value that is not
/// finite.
Statistics compute_statistics(const parallel::World&, const Description&, int n_threads, std::int64_t n_rows = 0);

/// Statistics as `compute_statistics` forms them, with a cache file for n_rows, the dataset's fingerprint and the sizes
/// and times of modification of its files. Recomputes and replaces a cache that is missing, damaged or of other rows.
/// Then checks the statistics against norm_stats.json, if present and of the same rows. Collective.
Statistics statistics(const parallel::World&, const Description&, const std::string& cache_path, int n_threads,
                      std::int64_t n_rows = 0);

/// Throws Error(data) if norm_stats.json is damaged or belongs to other data.
void check_against_file(const Statistics&, const Description&);
/// Compares statistics with the text of a norm_stats.json. Messages begin with `path`.
void check_against_text(const Statistics&, const Description&, const std::string& path, std::string_view text);

/// Lossless text form with a checksum. Parsing throws Error(data) if it is damaged or of another dataset.
std::string to_text(const Statistics&, const Description&);
Statistics statistics_from_text(const std::string& text, const Description&);

/// x~ = (x - mean) * scale, per layer and dimension: [n_layers * d_model] each.
struct Affine {
  std::vector<float> mean;
  std::vector<float> scale;
};
struct Normalisation {
  Affine inputs;
  Affine targets;
};

/// none: 0, 1. scalar: 0, sqrt(d_model) / mean norm of the layer. per_dimension: mean, 1 / (standard deviation + 1e-6).
/// Throws Error(data) if the mode is scalar and a layer is zero in every row.
Normalisation normalisation(const Statistics&, const Description&, Normalise mode);

/// One sentence per layer of inputs or targets in which dimensions have the same value in every row: such a dimension
/// has no standardised error.
std::vector<std::string> constant_dimensions(const Statistics&, const Description&);

/// The full check of `weft inspect`: reads all rows, requires finite values and agreement with norm_stats.json. The
/// message about values that are not finite says how many there are. Collective.
Statistics check(const parallel::World&, const Description&, int n_threads);

}  // namespace weft::dataset

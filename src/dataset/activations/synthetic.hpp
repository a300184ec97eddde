// SPDX-License-Identifier: Apache-2.0
//
// Activations with known answers: sparse codes over planted features that write to their own and later layers.
//
//   x_s[n] = sum over f of c[n,s,f] * e[s,f]                        + mean + noise
//   y_t[n] = sum over s <= t < s + reach, f of c[n,s,f] * w[s,f,t-s] + mean + noise
//
// Per token and layer exactly k features are active, drawn without replacement with Zipf-like weights (f + 1)^-zipf;
// c = 1 + |normal| / 4. e and each w block are random unit vectors, so for features > d_model far from orthogonal.
// Noise is nearly Gaussian (sums of four uniform numbers), its power `noise_db` below the signal's. Every number comes
// from the counter-based generator by token: any thread count, same file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/writer.hpp"

namespace weft::input {
class Schema;
}

namespace weft::dataset {

/// Table [synthetic].
struct SyntheticSettings {
  std::string output = "data/synthetic";  ///< gets train/, validation/ and ground_truth.h5
  std::int64_t layers = 4;
  std::int64_t d_model = 64;
  std::int64_t features = 256;    ///< planted per layer
  double k = 8;                   ///< active per token and layer; a fraction is the chance of one more
  std::int64_t tokens = 100'000;  ///< of the training set
  std::int64_t validation_tokens = 8192;
  std::int64_t rows_per_file = 50'000;
  std::int64_t reach = 0;    ///< layers a feature writes to, its own included; 0 = all that follow
  double noise_db = 20;      ///< signal power over noise power
  double zipf = 0.8;         ///< 0 = all features equally frequent
  double mean_offset = 1.0;  ///< standard deviation of the mean, in those of the signal
  kernels::Scalar dtype = kernels::Scalar::bf16;
  Compression compression = Compression::none;
  std::int64_t seed = 1;
};

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, SyntheticSettings&);

/// Writes both datasets and the ground truth. Throws Error(usage) for settings that make no dataset, Error(io) for what
/// cannot be written. `n_threads` threads.
void write_synthetic(const SyntheticSettings&, int n_threads);

/// What was planted.
struct GroundTruth {
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_features = 0;
  std::vector<std::vector<float>> encoder;       ///< per layer s: e [n_features, d_model]
  std::vector<std::vector<float>> decoder;       ///< per layer s: w [n_features, (n_layers - s) * d_model]
  std::vector<std::vector<double>> frequency;    ///< per layer: weight of each feature, sum 1
  std::vector<std::vector<std::int64_t>> fired;  ///< per layer: training tokens on which it was active
};
GroundTruth read_ground_truth(const std::string& path);
/// Where the ground truth of a dataset lies, DIR/../ground_truth.h5; "" when there is none.
std::string ground_truth_path(const std::string& dataset_path);

struct Recovery {
  double fraction = 0;  ///< recovered / counted, over all layers
  std::int64_t recovered = 0;
  std::int64_t counted = 0;       ///< planted features that fired at least 1,000 times
  std::vector<double> per_layer;  ///< NaN where none counts
};

/// learned[s]: decoder strips [n_learned, (n_layers - s) * d_model] of source layer s, fp32, in the space of the stored
/// activations. A planted feature is recovered when it has a partner with a cosine of at least 0.9 between the strips,
/// in the largest one-to-one matching of such pairs within the layer (augmenting paths: exact).
Recovery recovery(const GroundTruth&, std::span<const float* const> learned, std::int64_t n_learned, int n_threads);

}  // namespace weft::dataset

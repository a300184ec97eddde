// SPDX-License-Identifier: Apache-2.0
//
// Synthetic activations with known ground truth: sparse codes of planted features that write to their own and later
// layers.
//
//   x_s[n] = sum over f of c[n,s,f] * e[s,f]                        + mean + noise
//   y_t[n] = sum over s <= t < s + reach, f of c[n,s,f] * w[s,f,t-s] + mean + noise
//
// Exactly k features per token and layer are active, drawn without replacement with Zipf-like weights (f + 1)^-zipf;
// c = 1 + |normal| / 4. e and each block of w are random unit vectors, hence far from orthogonal for features >
// d_model. The id of a token is the planted feature of layer 0 with the largest c (the lowest of equal ones); documents
// begin at random, every kDocumentRows tokens on average. Noise is nearly Gaussian (sums of four uniform numbers), with
// a power `noise_db` below that of the signal. All numbers come from the counter-based generator, indexed by token:
// files do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/activation_writer.hpp"

namespace weft::input {
class Schema;
}

namespace weft::dataset {

/// Mean length of a document in tokens.
inline constexpr std::int64_t kDocumentRows = 128;

/// Table [synthetic].
struct SyntheticSettings {
  std::string output = "data/synthetic";  ///< gets train/, validation/ and ground_truth.h5
  std::int64_t layers = 4;
  std::int64_t d_model = 64;
  std::int64_t features = 256;    ///< planted per layer
  double k = 8;                   ///< active per token and layer; a fraction is the probability of one more
  std::int64_t tokens = 100'000;  ///< tokens of the training set
  std::int64_t validation_tokens = 8192;
  std::int64_t rows_per_file = 50'000;
  std::int64_t reach = 0;    ///< layers that a feature writes to, including its own; 0 = all later ones
  double noise_db = 20;      ///< signal power over noise power
  double zipf = 0.8;         ///< 0 = all features equally frequent
  double mean_offset = 1.0;  ///< standard deviation of the mean, relative to that of the signal
  kernels::Scalar dtype = kernels::Scalar::bf16;
  Compression compression = Compression::none;
  std::int64_t seed = 1;
};

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, SyntheticSettings&);

/// Writes both datasets and the ground truth with `n_threads` threads. Throws Error(usage) for invalid settings,
/// Error(io) if a file cannot be written or exists.
void write_synthetic(const SyntheticSettings&, int n_threads);

/// The planted features.
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
/// Path of the ground truth of a dataset, DIR/../ground_truth.h5; "" if it does not exist.
std::string ground_truth_path(const std::string& dataset_path);

struct Recovery {
  double fraction = 0;  ///< recovered / counted, over all layers
  std::int64_t recovered = 0;
  std::int64_t counted = 0;       ///< planted features that fired at least 1,000 times
  std::vector<double> per_layer;  ///< NaN if no feature of the layer counts
};

/// learned[s]: decoder strips [n_learned, (n_layers - s) * d_model] of source layer s, fp32, in the space of the stored
/// activations. Pairs of a planted and a learned feature with a cosine of at least 0.9 between their strips are matched
/// one to one within each layer, by a maximum matching (augmenting paths, exact). Matched planted features are
/// recovered.
Recovery recovery(const GroundTruth&, std::span<const float* const> learned, std::int64_t n_learned, int n_threads);

}  // namespace weft::dataset

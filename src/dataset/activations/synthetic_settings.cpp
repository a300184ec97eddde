// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/synthetic.hpp"
#include "input/schema.hpp"
#include "kernels/constants.hpp"

namespace weft::dataset {

void add_keys(input::Schema& schema, SyntheticSettings& s) {
  schema.table("synthetic", "Synthetic data with planted features, for weft synth.");
  schema.add("synthetic.output", s.output, "directory that gets train/, validation/ and ground_truth.h5")
      .path_name()
      .free();
  schema.add("synthetic.layers", s.layers, "layers of the model").at_least(1).at_most(kernels::kMostLayers).free();
  schema.add("synthetic.d_model", s.d_model, "dimensions of an activation").at_least(1).free();
  schema.add("synthetic.features", s.features, "planted features per layer").at_least(1).free();
  schema
      .add("synthetic.k", s.k,
           "active features per token and layer; the fractional part is the probability of one more")
      .more_than(0)
      .free();
  schema.add("synthetic.tokens", s.tokens, "tokens of the training set").in("tokens").at_least(1).free();
  schema.add("synthetic.validation_tokens", s.validation_tokens, "tokens of the validation set")
      .in("tokens")
      .at_least(1)
      .free();
  schema.add("synthetic.rows_per_file", s.rows_per_file, "tokens in one file").in("tokens").at_least(1).free();
  schema
      .add("synthetic.reach", s.reach,
           "layers that a feature writes to, including its own; 0 = its own and all later ones")
      .at_least(0)
      .free();
  schema.add("synthetic.noise_db", s.noise_db, "signal power over noise power").in("dB").free();
  schema.add("synthetic.zipf", s.zipf, "exponent of the frequencies of the features; 0 = all equal").at_least(0).free();
  schema.add("synthetic.mean_offset", s.mean_offset, "size of the mean, in standard deviations of the signal")
      .at_least(0)
      .free();
  schema
      .add("synthetic.dtype", s.dtype,
           {{"fp32", kernels::Scalar::fp32}, {"fp16", kernels::Scalar::fp16}, {"bf16", kernels::Scalar::bf16}},
           "type in the files")
      .free();
  schema
      .add("synthetic.compression", s.compression, {{"none", Compression::none}, {"gzip", Compression::gzip}},
           "filter of the files")
      .free();
  schema.add("synthetic.seed", s.seed, "seed of the random numbers").at_least(0).free();
}

}  // namespace weft::dataset

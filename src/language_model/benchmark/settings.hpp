// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "training/benchmark.hpp"

namespace weft::language_model {

/// The attention of a case: that of training, or the baseline with the matrix of scores in memory.
enum class BenchmarkAttention { flash, matrix };

/// Table [benchmark] of a language model.
struct BenchmarkSettings : training::BenchmarkSettings {
  BenchmarkSettings();  ///< the cases of docs/experiments.md

  std::int64_t vocabulary = 50257;  ///< ids of the batches
  std::int64_t batch_tokens = 0;    ///< tokens per step of the cases with a name; 0: data.batch_tokens
  BenchmarkAttention attention = BenchmarkAttention::flash;
  double loss_tolerance = 0.01;  ///< relative
  double peak_tflops = 0;        ///< 0: not stated
};

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, BenchmarkSettings&);

}  // namespace weft::language_model

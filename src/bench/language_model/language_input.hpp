// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "bench/benchmark.hpp"
#include "polychromic/polychromic_settings.hpp"

namespace weft::bench {

/// The attention of a case: that of training, or the baseline with the matrix of scores in memory.
enum class BenchmarkAttention { flash, matrix };

/// Whether a step collects the rows of MLPs instead of training: where the kernels run, or to host memory.
enum class BenchmarkHarvest { off, compute, host };

/// Table [benchmark] of a language model.
struct LanguageSettings : BenchmarkSettings {
  LanguageSettings();  ///< the cases of docs/experiments.md

  std::string data;                 ///< token file, or directory of token files; "": random ids
  std::int64_t vocabulary = 50257;  ///< ids of the batches
  std::int64_t batch_tokens = 0;    ///< tokens per step of the cases with a name; 0: data.batch_tokens
  BenchmarkAttention attention = BenchmarkAttention::flash;
  /// A step generates as many tokens for each sequence instead of training; 0: it trains.
  std::int64_t generate_tokens = 0;
  std::int64_t generate_rows = 64;     ///< sequences
  std::int64_t generate_samples = 1;   ///< samples of each prompt; divides the sequences
  std::int64_t generate_prompt = 128;  ///< tokens of a prompt
  BenchmarkHarvest harvest = BenchmarkHarvest::off;
  // Baselines, with the same result bit for bit.
  bool overlap = true;
  bool private_overlap = true;
  double loss_tolerance = 0.01;  ///< relative
  double peak_tflops = 0;        ///< 0: not stated
};

/// The input of all commands for language models.
struct LanguageInput {
  polychromic::Configuration configuration;
  LanguageSettings benchmark;
};

/// Every key, bound to the input, which must outlive the schema.
input::Schema language_keys(LanguageInput&);
/// Every key, as language_keys; data.train must be given.
input::Schema language_training_keys(LanguageInput&);

}  // namespace weft::bench

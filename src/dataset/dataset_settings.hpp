// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::input {
class Schema;
}

namespace weft::dataset {

enum class Normalise { none, scalar, per_dimension };
enum class Targets { outputs, inputs };

/// Table [data].
struct Settings {
  std::string train;       ///< directory of the training set; environment variables are expanded
  std::string validation;  ///< directory of the validation set; "" = none
  /// A language model (run, checkpoint or directory of Hugging Face) that computes the rows, instead of `train`; "" =
  /// none
  std::string model;
  std::vector<std::string> text;             ///< files for `model`; empty: the text that it was trained on
  std::vector<std::string> validation_text;  ///< the same for validation; {kHeldOut}: what its training held out
  std::int64_t sequence = 0;                 ///< ids of a text segment; 0 = as the model was trained
  std::int64_t statistics_rows = 0;          ///< mean and scale are those of the first rows; 0 = of all
  std::int64_t batch_tokens = 4096;          ///< tokens per step, all ranks together
  std::int64_t micro_tokens = 0;             ///< tokens decoded at a time on a rank; 0 = chosen to fit
  Normalise normalise = Normalise::per_dimension;
  Targets targets = Targets::outputs;  ///< what is reconstructed: the stored targets, or the inputs themselves
  std::int64_t block_rows = 256;       ///< consecutive rows read at once
  std::int64_t window_rows = 65536;    ///< rows shuffled together; all ranks together hold twice as many in memory
  bool prefetch = true;                ///< no key; rows are read and exchanged ahead of the steps
  /// "bf16": unsigned 16-bit integers in the files are bf16 patterns; "" = decided by type and attribute.
  std::string stored_as = "";
  std::int64_t layers = 0;   ///< layers that the files must have; 0 = any. Given together with d_model, or not at all
  std::int64_t d_model = 0;  ///< dimensions that the files must have; 0 = any
  bool accept_changed = false;  ///< resume although the dataset's fingerprint changed

  bool validates() const { return !validation.empty() || !validation_text.empty(); }
};

/// data.validation_text: the part of the model's own text that its training held out.
inline constexpr const char* kHeldOut = "held_out";
/// Defaults with a language model: rows of one forward pass, and rows from which mean and scale are computed.
inline constexpr std::int64_t kModelBlockRows = 4096, kModelStatisticsRows = 65536;

/// The keys of the table and the conditions between them, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, Settings&);

}  // namespace weft::dataset

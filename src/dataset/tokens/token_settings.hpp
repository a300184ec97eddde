// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::input {
class Schema;
}

namespace weft::dataset {

enum class TokenOrder { random_windows, sequential, shuffled, curriculum };
enum class Pack { stream, documents };
enum class LongDocuments { cut, drop };
/// What the files are. by_name: by their names and first bytes.
enum class DataFormat { by_name, text, jsonl, tokens };
enum class LossOn { completion, all };
/// What is done about a line of JSON Lines that cannot be used.
enum class BadLines { stop, skip };

/// Table [data] of a language model.
struct TokenSettings {
  std::string train;       ///< text file, JSON Lines, token file or directory of token files
  std::string validation;  ///< the same; "" = a part of `train`, or none
  DataFormat format = DataFormat::by_name;
  LossOn loss_on = LossOn::completion;
  BadLines bad_lines = BadLines::stop;
  /// "character", "bytes", or the path of a tokeniser file or of its directory. "" = the tokeniser of the token files
  /// or of the initial model; else of text: characters.
  std::string tokens;
  bool add_special_tokens = true;     ///< those that the post-processor of a tokenizer.json adds to a text
  std::vector<std::string> special;   ///< symbols added to "character" and "bytes": PAD, UNK, BOS, EOS
  std::int64_t batch_tokens = 16384;  ///< tokens per step, all ranks together
  std::int64_t sequence = 256;        ///< tokens per sequence
  std::int64_t sequence_start =
      0;  ///< tokens per sequence in the first steps; doubles until it is `sequence`. 0: `sequence`
  std::int64_t sequence_growth_steps = 0;  ///< steps after which it is `sequence`
  TokenOrder order = TokenOrder::random_windows;
  std::int64_t curriculum_steps = 0;  ///< order = "curriculum": steps until all segments are drawn
  Pack pack = Pack::stream;
  LongDocuments long_documents = LongDocuments::cut;
  bool document_mask = false;      ///< attention stays within a document
  double validation_fraction = 0;  ///< tail of `train` that is held out, in [0, 1)
  bool accept_changed = false;     ///< resume although the fingerprint changed

  std::int64_t shortest() const { return sequence_start > 0 ? sequence_start : sequence; }
  /// Tokens per sequence in this step, from 1: sequence_start doubles in equal stretches of sequence_growth_steps.
  std::int64_t length_at(std::int64_t step) const;
};

/// The keys that say how files become tokens, also those of `weft lm tokenize`.
void add_text_keys(input::Schema&, TokenSettings&);
/// The keys of the table and the conditions between them, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, TokenSettings&);

}  // namespace weft::dataset

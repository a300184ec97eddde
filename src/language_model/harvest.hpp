// SPDX-License-Identifier: Apache-2.0
//
// Records the MLPs of a language model on a text: inputs and outputs of every layer, token ids and the rows at which
// documents begin, as an activation dataset (docs/file_formats.md).
//
// The texts are one stream of ids, which is cut into windows of `length` ids; an incomplete last window is left out.
// The model sees each window alone. File i has the windows from i * windows_per_file on, in batches that begin at its
// first window: its bytes depend on model, text and settings alone, whichever process writes it and whenever.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/chunk_files.hpp"
#include "dataset/tokens/token_set.hpp"
#include "device/memory.hpp"
#include "language_model/staging.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "language_model/transformer.hpp"

namespace weft::language_model {

/// Where the recorded values are taken: "block_{}.mlp.input" is the input of the MLP (after its norm, if it has one),
/// the other its output, before a norm of it.
inline constexpr const char* kInputHook = "block_{}.mlp.input";
inline constexpr const char* kOutputHook = "block_{}.mlp.output";

/// Sets of ids, one after the other. Each begins a document.
class TextStream {
 public:
  /// At least one set.
  explicit TextStream(std::vector<dataset::TokenSet> sets);

  std::int64_t size() const { return begins_.back(); }
  void read(std::int64_t begin, std::span<std::uint32_t> ids) const;
  /// Positions in [begin, end) at which a document starts, ascending, relative to `begin`. Replaces `starts`.
  void document_starts(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& starts) const;
  /// Identifies the ids: fingerprints of files, sha256 of ids in memory.
  std::string fingerprint() const;

 private:
  std::vector<dataset::TokenSet> sets_;
  std::vector<std::int64_t> begins_;  // of the sets, and the end of the last
};

struct HarvestSettings {
  std::int64_t length = 0;            ///< ids of a window
  std::int64_t windows = 0;           ///< all of them
  std::int64_t windows_per_file = 0;  ///< the last file may have fewer
  std::int64_t together = 0;          ///< windows of a forward pass

  std::int64_t files() const { return (windows + windows_per_file - 1) / windows_per_file; }
  std::int64_t windows_of(std::int64_t file) const {
    return std::min(windows_per_file, windows - file * windows_per_file);
  }
  std::int64_t rows_of(std::int64_t file) const { return windows_of(file) * length; }
};

/// The text of each id, decoded alone.
std::vector<std::string> token_texts(const Tokenizer&);

class Harvester {
 public:
  /// The transformer and the staging memory take together * length rows. References must outlive the object.
  Harvester(const HarvestSettings&, const TextStream&, const ModelSettings&, Transformer&, Staging&,
            const kernels::Execution&);

  /// Writes these files, several at a time: a batch is computed while those before it are written, each by a thread of
  /// its file. Throws Error(numeric) with layer and token if a value of the model is not finite, Error(data) if it is
  /// not in the type of the files.
  void write(std::span<const std::int64_t> numbers, const dataset::ChunkFiles&);

 private:
  struct OpenFile;
  /// The next batch of the file, into its memory; then begins to write it.
  void append(OpenFile&, kernels::Scalar type);
  void fill(std::int64_t first_window, dataset::TokenBatch&);
  [[noreturn]] void locate(std::int64_t first_window, const Tokens&, kernels::Scalar stored);

  const HarvestSettings settings_;
  const TextStream& text_;
  const ModelSettings model_;
  Transformer& transformer_;
  Staging& staging_;
  const kernels::Execution execution_;
  device::Buffer<std::byte> inputs_, targets_;  // of the batch: [rows, layers * d_model] as stored
  device::Buffer<std::int32_t> flag_;           // [1]: a value of the batch is not finite
  std::vector<std::int64_t> starts_;            // of the batch: rows at which documents begin
  std::vector<std::int32_t> positions_;         // of the batch: in the window
};

}  // namespace weft::language_model

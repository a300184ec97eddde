// SPDX-License-Identifier: Apache-2.0
//
// Records the MLPs of a language model on a text: inputs and outputs of every layer, token ids and the rows at which
// documents begin, as an activation dataset (docs/file_formats.md).
//
// The texts are one stream of ids, which is cut into segments of `length` ids; an incomplete last segment is left out.
// The model reads each segment separately. File i has the segments from i * windows_per_file on, in batches that begin
// at its first segment: its bytes depend on model, text and settings alone, whichever process writes it and whenever.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dataset/activations/chunk_files.hpp"
#include "language_model/step/mlp_recorder.hpp"
#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

struct HarvestSettings : Windows {
  std::int64_t together = 0;  ///< text segments of a forward pass
};

/// The text of each id, detokenised separately.
std::vector<std::string> token_texts(const Tokenizer&);

class Harvester {
 public:
  /// The transformer and the staging memory take together * length rows. References must outlive the object.
  Harvester(const HarvestSettings&, const TextStream&, const ModelSettings&, Transformer&, Staging&,
            const kernels::Execution&);

  /// Writes these files, several at a time: a batch is computed while the one before it is copied to the host and those
  /// before that are written, each by a thread of its file. Throws Error(numeric) with layer and token if a value of
  /// the model is not finite, Error(data) if it is not in the type of the files. Of a divided model one rank `writes`;
  /// the others take part in its forward passes.
  void write(std::span<const std::int64_t> numbers, const dataset::ChunkFiles&, bool writes = true);

 private:
  struct OpenFile;
  /// Starts to compute the next batch of the file, into its memory.
  void append(OpenFile&, MlpRecorder&);

  const HarvestSettings settings_;
  const TextStream& text_;
  const ModelSettings model_;
  Transformer& transformer_;
  Staging& staging_;
  const kernels::Execution execution_;
};

}  // namespace weft::language_model

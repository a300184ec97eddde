// SPDX-License-Identifier: Apache-2.0
//
// Embeddings of texts by an encoder that sentence-transformers has saved (Reimers & Gurevych 2019): the mean of the
// hidden states over the tokens of a text, those that the tokeniser adds included. They are those of
// sentence-transformers within the rounding of fp32, before it gives them unit length, which changes no cosine.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "kernels/language/diversity/pool_rows.hpp"
#include "language_model/encoder/encoder.hpp"
#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

class SentenceEncoder {
 public:
  /// Reads all files of the directory. Throws Error(usage) that names the first setting that Weft lacks, Error(data).
  SentenceEncoder(const std::filesystem::path& directory, const kernels::Execution&);

  /// What is known without the weights: columns of an embedding, and bytes where the kernels run. Checks all files but
  /// the values of the weights. Throws as the constructor.
  struct Size {
    std::int64_t width = 0, bytes = 0;
  };
  static Size size(const std::filesystem::path& directory);

  std::int64_t width() const { return encoder_.shape().d_model; }

  /// Embeds the texts. out: [texts, width()], where the kernels run; zeros for an empty text. As sentence-transformers
  /// does, cuts a text that has more tokens than the directory allows; the first time this is logged. Waits for the
  /// results.
  void embed(std::span<const std::string> texts, kernels::Matrix<float> out);

  /// Digest (sha256) of the weights.
  std::string digest() const { return encoder_.digest(); }

 private:
  SentenceEncoder(const BertDirectory&, const std::filesystem::path&, const kernels::Execution&);
  std::vector<std::uint32_t> ids_of(const std::string& text);

  const std::filesystem::path directory_;
  const kernels::Execution execution_;
  const Tokenizer tokenizer_;
  const std::int64_t longest_;  ///< tokens of a text, the added ones included
  Encoder encoder_;
  device::HostBuffer<kernels::PooledRows> host_pooled_;
  device::Buffer<kernels::PooledRows> pooled_;
  bool has_cut_ = false;
};

}  // namespace weft::language_model

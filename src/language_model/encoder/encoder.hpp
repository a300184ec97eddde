// SPDX-License-Identifier: Apache-2.0
//
// Forward pass of an encoder (Devlin et al. 2019), in fp32. Of each layer, with the hidden states h:
//
//   h = norm(h + attention(h))        h = norm(h + mlp(h))
//
// Every token attends to all tokens of its text. Texts lie one after the other, without padding, so that the hidden
// states of a text are those of the text alone, within the rounding of products of another shape.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/memory.hpp"
#include "kernels/language/attention/text_attention.hpp"
#include "kernels/language/linear/linear.hpp"
#include "language_model/encoder/bert_directory.hpp"

namespace weft::language_model {

class Encoder {
 public:
  /// Reads the weights. rows: most tokens of a forward pass.
  Encoder(const BertDirectory&, std::int64_t rows, const kernels::Execution&);
  /// Bytes of an encoder where the kernels run.
  static std::int64_t bytes(const EncoderShape&, std::int64_t rows);

  const EncoderShape& shape() const { return shape_; }
  /// ids: those of the texts one after the other, at most `rows`, each below the vocabulary; sizes: tokens of each
  /// text, at most shape().positions. Returns the hidden states [ids, d_model], fp32, where the kernels run, until the
  /// next call. Waits for them.
  kernels::AnyMatrix forward(std::span<const std::uint32_t> ids, std::span<const std::int64_t> sizes);
  /// Digest (sha256) of the weights.
  std::string digest() const;

 private:
  struct Layer {
    kernels::LinearWeights projection, output, up, down;
    kernels::NormWeights attention_norm, mlp_norm;
  };
  /// Rows [rows, columns] of fp32.
  struct Rows {
    Rows(std::int64_t rows, std::int64_t columns) : memory(rows * columns), columns(columns) {}
    kernels::AnyMatrix first(std::int64_t rows) const;

    device::Buffer<float> memory;
    std::int64_t columns;
  };
  void load(const BertDirectory&);
  void normalise(const kernels::NormWeights&, kernels::AnyMatrix x, kernels::AnyMatrix addend,
                 kernels::AnyMatrix y) const;

  const EncoderShape shape_;
  const std::int64_t most_rows_;
  const kernels::Execution execution_;
  device::Buffer<float> weights_;
  kernels::AnyMatrix tokens_, positions_;  // the positions have the embedding of token type 0 in them
  kernels::NormWeights embedding_norm_;
  std::vector<Layer> layers_;

  device::HostBuffer<std::uint32_t> host_ids_;
  device::HostBuffer<std::int32_t> host_positions_;
  device::HostBuffer<kernels::TextRows> host_texts_;
  device::Buffer<std::uint32_t> ids_;
  device::Buffer<std::int32_t> position_;
  device::Buffer<kernels::TextRows> texts_;
  const Rows hidden_, next_hidden_, sum_, packed_, mixed_, inner_, activated_;
  const device::Buffer<float> mean_, inverse_;
  const device::Buffer<std::byte> workspace_;
};

}  // namespace weft::language_model

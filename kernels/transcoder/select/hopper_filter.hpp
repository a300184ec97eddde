// SPDX-License-Identifier: Apache-2.0
//
// The encoder's products with the filter of a selection in their epilogue (hopper_filter_cuda.cu), for select_cuda.cu:
// pre-activations are not stored. topk stores them, with the largest of each part of a row. Requires GPUs of compute
// capability 9.0.
//
//   p = bf16(< x[n], W[f] >), sums in fp32        r = p + bias[f] in fp32        listed if r > threshold, or >
//   bounds[f]
//
// Invariant: both functions form the same bits of p, so one pass over the tiles may filter products and another pass
// store them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"

namespace weft::kernels::cuda {

/// Features of a segment: the entries of a token in this many features of a layer are consecutive in the list.
constexpr std::int64_t kHopperFeatures = 256;

/// The filter and its lists, on the device; names and meaning as in View (select_view_cuda.cuh).
struct HopperFilter {
  const float* limit;              ///< [layers, padded_features]: p up to it cannot pass; infinity beyond the features
  const float* const* bias;        ///< on the host: [layers] arrays [features],
  const float* const* bounds;      ///< on the host: [layers] arrays [features]; null: no layer has bounds
  std::int64_t padded_features;    ///< a multiple of kHopperFeatures
  const std::uint32_t* threshold;  ///< null: 0
  unsigned long long* cursor;      ///< cursor of the first group
  std::int64_t cursor_stride;      ///< distance between the cursors of consecutive groups
  std::int64_t capacity;
  std::uint32_t* key;
  float* value;
  uint2* segment;  ///< [tokens of the operands, layers, features / kHopperFeatures, rounded up]
  bool all_layers;
};

/// True if this GPU and these operands are supported.
bool takes_hopper_filter(const EncoderOperands&);

/// Runs the filter of a pass over the tiles of layers [layer_begin, layer_end). Only x and weight of the operands are
/// used.
void filter_hopper_products(const Execution&, const EncoderOperands&, std::int64_t layer_begin, std::int64_t layer_end,
                            const HopperFilter&);

/// Number of features in a part of a row (PartsOfRows).
constexpr std::int64_t kHopperPart = 64;

/// The largest r = p + bias of each part of a row (kHopperPart features), 0 if none is positive. On the device.
struct PartsOfRows {
  const float* bias =
      nullptr;  ///< [features], padded with -infinity to a multiple of kHopperFeatures; aligned to 16 bytes
  float* largest = nullptr;  ///< [tokens, features / kHopperPart, rounded up]; null: not formed
};

/// Overwrites product [tokens, features] (bf16) with p, rows aligned to 16 bytes; x [tokens, d], weight [features, d].
void store_hopper_products(const Execution&, AnyMatrix x, AnyMatrix weight, AnyMatrix product, const PartsOfRows& = {});

}  // namespace weft::kernels::cuda

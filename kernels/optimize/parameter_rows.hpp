// SPDX-License-Identifier: Apache-2.0
//
// Parameter matrices with their Adam moments, and how both are stored (the one table of storage types).
//
//   storage    weight                          first moment m, second moment v      bytes per parameter
//   fp32       fp32 (portable)                 fp32, fp32                           12
//              bf16 plane + 16-bit rest (cuda)                                      12
//   bf16       bf16, stochastic rounding       bf16, bf16, stochastic rounding       6
//   8bit       bf16, stochastic rounding       e4m3 codes (codec.hpp) of m and       4 + 8 / block
//                                              sqrt(v), stochastic rounding, one
//                                              fp32 scale per block each
//
// A block is at most 256 columns and never crosses the border of a target layer inside a row: with d columns per
// target, a target has ceil(d / 256) blocks, the last one short.
//
// Weights that are not trained may be packed, in 8 or 4 bits (packed_weights.hpp); their storage type is bf16, to which
// they are unpacked.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

enum class StorageType : int { fp32, bf16, eight_bit };

/// Codes of weights that are not trained (packed_weights.hpp).
enum class Packing : int { none, int8, nf4 };

constexpr std::int64_t kBlockColumns = 256;

/// [rows, columns] parameters in their storage type. Encoder of layer s: rows = F, columns = d. Decoder of source s:
/// rows = F, columns = (L - s) * d, the strip of one feature contiguous.
struct ParameterRows {
  StorageType storage = StorageType::fp32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t segment = 0;    ///< columns of one target layer (d); divides `columns`
  std::int64_t first_row = 0;  ///< global index of row 0: features of other shards come before it
  std::uint64_t element_base =
      0;  ///< global index of this matrix' element (row 0 of the whole, column 0); keys the random numbers

  void* weight = nullptr;               ///< float | bf16
  std::int16_t* weight_rest = nullptr;  ///< cuda fp32 only: bits(w) = (bits(hi) << 16) + rest; else nullptr
  void* first_moment = nullptr;         ///< float | bf16 | u8
  void* second_moment = nullptr;        ///< float | bf16 | u8 (codes of the square root)
  float* first_scale = nullptr;         ///< 8bit: [rows, blocks_per_row()]
  float* second_scale = nullptr;

  Packing packing = Packing::none;  ///< else `weight` are codes; there are no moments
  std::uint8_t* block_scales = nullptr;
  float* row_scales = nullptr;

  WEFT_HOST_DEVICE std::int64_t blocks_per_segment() const { return (segment + kBlockColumns - 1) / kBlockColumns; }
  WEFT_HOST_DEVICE std::int64_t blocks_per_row() const { return columns / segment * blocks_per_segment(); }
  WEFT_HOST_DEVICE std::uint64_t global_element(std::int64_t row, std::int64_t column) const {
    return element_base + static_cast<std::uint64_t>(first_row + row) * static_cast<std::uint64_t>(columns) +
           static_cast<std::uint64_t>(column);
  }
};

/// What matrix products read of weights: of fp32 ones in two planes the bf16 one.
constexpr Scalar product_type(StorageType storage, bool planes) {
  return storage == StorageType::fp32 && !planes ? Scalar::fp32 : Scalar::bf16;
}
inline AnyMatrix product_weights(const ParameterRows& p) {
  return {p.weight, product_type(p.storage, p.weight_rest != nullptr), p.rows, p.columns, p.columns};
}

/// A vector of parameters (biases): always fp32 with fp32 moments, whatever the storage type of matrices.
struct ParameterVector {
  Array<float> weight;
  Array<float> first_moment;
  Array<float> second_moment;
};

/// Constants of one optimizer step, in memory that kernels read, so that a captured step can be replayed.
struct AdamStep {
  float learning_rate;
  float beta1;
  float beta2;
  float first_gain;  ///< 1 - beta1 and 1 - beta2, rounded once from the exact difference: 1.0f - 0.999f is 1e-5 off
  float second_gain;
  float epsilon;
  float weight_decay;       ///< decoupled (AdamW): w -= learning_rate * weight_decay * w
  float first_correction;   ///< 1 / (1 - beta1^t)
  float second_correction;  ///< 1 / (1 - beta2^t)
  float gradient_scale;     ///< clipping: every gradient is first multiplied by this
  std::uint64_t seed;
  std::uint64_t step;          ///< t, from 1
  std::uint32_t withheld = 0;  ///< not 0: the step updates nothing (set by guard_step)
};

}  // namespace weft::kernels

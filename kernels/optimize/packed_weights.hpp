// SPDX-License-Identifier: Apache-2.0
//
// Weights that are not trained, packed in 8 or 4 bits, as for the frozen model of QLoRA (Dettmers et al. 2023, arXiv
// 2305.14314).
//
//   packing   weight                         code                                   bits per weight with 4096 columns
//   int8      scale / 127 * code             -127 … 127, two's complement           8.14
//   nf4       scale * normal_value(code)     0 … 15, two in a byte, first one high  4.14
//
// A scale belongs to a block of at most 64 columns of a row: its largest magnitude. Scales are coded too (double
// quantisation), in 8 bits between the smallest and the largest scale of the row:
//
//   scale = middle + step * (code - 127)     middle, step: fp32, one pair per row
//
// The middle of the scales, not their mean: it halves the largest error and does not depend on an order of summation.
// Codes of weights are nearest with the scale as it is decoded. A row is packed and unpacked by itself, so that rows
// are divided among ranks like those of other matrices. A packed weight is rounded to bf16 when it is unpacked: all
// readers see one number. A row with a weight that is not finite becomes NaN.
#pragma once

#include <cmath>

#include "kernels/bf16.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// Columns of a block.
constexpr std::int64_t kPackedColumns = 64;
constexpr std::int64_t packed_blocks(std::int64_t columns) { return (columns + kPackedColumns - 1) / kPackedColumns; }
/// Bytes of the codes of a row.
constexpr std::int64_t packed_bytes(Packing packing, std::int64_t columns) {
  return packing == Packing::nf4 ? (columns + 1) / 2 : columns;
}
/// Numbers in ParameterRows::row_scales per row: middle and step.
constexpr std::int64_t kRowScales = 2;

/// The 16 values of nf4: quantiles of the normal distribution that divide it evenly, 8 for positive numbers, 7 for
/// negative ones and 0, divided by the largest (Dettmers et al. 2023, appendix E).
WEFT_HOST_DEVICE inline float normal_value(int code) {
  constexpr float kValues[16] = {-1.0f,
                                 -0.6961928009986877f,
                                 -0.5250730514526367f,
                                 -0.39491748809814453f,
                                 -0.28444138169288635f,
                                 -0.18477343022823334f,
                                 -0.09105003625154495f,
                                 0.0f,
                                 0.07958029955625534f,
                                 0.16093020141124725f,
                                 0.24611230194568634f,
                                 0.33791524171829224f,
                                 0.44070982933044434f,
                                 0.5626170039176941f,
                                 0.7229568362236023f,
                                 1.0f};
  return kValues[code];
}

/// The scale of a block. fma: the same bits whether the compiler contracts products or not.
WEFT_HOST_DEVICE inline float packed_scale(std::uint8_t code, float middle, float step) {
  const float scale = ::fmaf(step, static_cast<float>(code) - 127.0f, middle);
  return scale < 0.0f ? 0.0f : scale;
}
/// What weights of a block are multiplied by before coding; 0 for a block of zeros.
WEFT_HOST_DEVICE inline float packed_inverse(Packing packing, float scale) {
  if (scale < 0x1p-100f) return 0.0f;
  return packing == Packing::nf4 ? 1.0f / scale : 127.0f / scale;
}
/// What a code is multiplied by.
WEFT_HOST_DEVICE inline float packed_unit(Packing packing, float scale) {
  return packing == Packing::nf4 ? scale : scale * (1.0f / 127.0f);
}

/// Packs rows [row_begin, row_begin + in.rows) of `packed` from fp32.
void pack_weights(const Execution&, const ParameterRows& packed, std::int64_t row_begin, Matrix<const float> in);

/// Unpacks rows [row_begin, row_begin + out.rows); out: fp32 or bf16, [n, columns].
WEFT_KERNEL(unpack_weights, void(const Execution&, const ParameterRows& packed, std::int64_t row_begin, AnyMatrix out));

}  // namespace weft::kernels

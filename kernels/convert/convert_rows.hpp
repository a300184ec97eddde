// SPDX-License-Identifier: Apache-2.0
//
// Conversion of raw rows as stored in a file (fp32, fp16 or bf16) to normalised rows, and copies of rows.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// out[i, j] = (raw[i, j] - mean[j]) * scale[j], computed in fp32, stored as out.type (fp32 or bf16). raw: fp32, fp16
/// or bf16; mean and scale [columns]. *flag |= 1 when a raw value is not finite.
WEFT_KERNEL(normalise_rows, void(const Execution&, AnyMatrix raw, Array<const float> mean, Array<const float> scale,
                                 AnyMatrix out, std::int32_t* flag));

/// out = in, of the same type and size; strides may differ.
WEFT_KERNEL(copy_rows, void(const Execution&, AnyMatrix in, AnyMatrix out));

/// Rounds to the nearest bf16 numbers, in place.
void round_to_bf16(const Execution&, Array<float> values);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Conversion of rows between types and spaces.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// out = scale[j] * in + shift[j] + addend, in fp32, rounded once to the type of `out`. Each of fp32, bf16 or fp16, of
/// equal shapes. scale, shift: [columns]; empty: 1 and 0. addend.data null: 0; without all three the values pass
/// unchanged, which converts them. `out` may be `in` or `addend`. flag, if given: *flag |= 1 if a value as stored in
/// `out` is not finite.
void affine_rows(const Execution&, AnyMatrix in, Array<const float> scale, Array<const float> shift, AnyMatrix addend,
                 AnyMatrix out, std::int32_t* flag = nullptr);

}  // namespace weft::kernels

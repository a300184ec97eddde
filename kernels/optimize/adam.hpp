// SPDX-License-Identifier: Apache-2.0
//
// Adam with bias correction and decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019) on gradients in
// memory, and the initialisation of parameters:
//
//   g' = gradient_scale * g      m = b1*m + (1-b1)*g'      v = b2*v + (1-b2)*g'^2
//   w  = w - lr * ( m*first_correction / (sqrt(v*second_correction) + eps) + weight_decay * w )
//
// All arithmetic is fp32; ParameterRows::storage is the storage type of w, m and v. `decode/` and `encode/` apply the
// same rule inside their backward kernels, where the gradient is never stored.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

/// Rows [row_begin, row_begin + gradient.rows) of `parameters`, from an explicit gradient [n, columns] fp32.
WEFT_KERNEL(adam_rows, void(const Execution&, const ParameterRows& parameters, std::int64_t row_begin,
                            Matrix<const float> gradient, const AdamStep* step));

/// A bias vector; weight decay is not applied to biases.
WEFT_KERNEL(adam_vector, void(const Execution&, const ParameterVector& parameters, Array<const float> gradient,
                              const AdamStep* step));

/// Weights uniform in [-bound, bound]; a weight depends on the seed and its global index alone. Moments are not touched
/// (the caller zeroes them; they may be elsewhere).
WEFT_KERNEL(initialise_uniform,
            void(const Execution&, const ParameterRows& parameters, float bound, std::uint64_t seed, Purpose purpose));

/// weight rows as fp32 [rows, columns], independent of the storage: for evaluation, export and tests.
WEFT_KERNEL(weights_to_float,
            void(const Execution&, const ParameterRows& parameters, std::int64_t row_begin, Matrix<float> out));

/// The inverse: in [n, columns] becomes rows [row_begin, row_begin + n), exactly for fp32 weights (also if stored
/// as two planes), rounded to nearest for bf16.
WEFT_KERNEL(weights_from_float,
            void(const Execution&, const ParameterRows& parameters, std::int64_t row_begin, Matrix<const float> in));

/// *flag |= 1 when any weight or moment is not finite.
WEFT_KERNEL(flag_nonfinite, void(const Execution&, const ParameterRows& parameters, std::int32_t* flag));

/// *flag |= 1 when any element is NaN or its magnitude is above `largest`.
WEFT_KERNEL(flag_beyond, void(const Execution&, AnyMatrix matrix, float largest, std::int32_t* flag));

}  // namespace weft::kernels

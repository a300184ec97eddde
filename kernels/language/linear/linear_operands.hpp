// SPDX-License-Identifier: Apache-2.0
//
// Operands of a product (linear.hpp). Input and output are rows or, where a norm comes before the product or a sum with
// the residual stream after it, what these need: one kernel for few rows then forms all of it. A product that forms
// residual rows h leaves their moments and weight ∘ h, with the weight of the norm that follows. The product that reads
// them multiplies these rows and applies the statistics to its sums:
//
//   norm(h) Wᵀ + b = r ((weight ∘ h) Wᵀ - mean s) + c       s_o = sum_i W_oi weight_i     c_o = b_o + sum_i W_oi bias_i
//
// Instead of norm(h), weight ∘ h is rounded. With a large mean the error is larger, by sqrt(1 + mean^2 / variance).
#pragma once

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/language/linear/row_moments.hpp"
#include "kernels/language/norm/norm.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// Most rows of a product that has a kernel for few rows.
constexpr std::int64_t kMostFewRows = 64;

/// s and c above, [outputs] each.
struct NormTerms {
  Array<const float> sums, bias;
};
/// True if a product needs them to apply the norm: without mean and bias they are 0 and b.
inline bool needs_terms(const NormWeights& norm) { return norm.kind == Norm::layer || norm.bias.size > 0; }

/// Rows times a weight of each column.
struct ScaledRows {
  Array<const float> weight;  ///< [columns]
  AnyMatrix rows;             ///< [n, columns]; without data: none
};

/// Weights and bias of a product.
struct LinearWeights {
  AnyMatrix matrix;  ///< W [outputs, inputs], or its transpose
  /// Codes of W (optimize/packed_weights.hpp), or null. `matrix` is then memory to which W is unpacked where a product
  /// needs it. They must outlive the call.
  const ParameterRows* packed = nullptr;
  bool transposed = false;              ///< stored as [inputs, outputs]
  bool by_row = false;                  ///< the product is that of gemm_by_row, of fp32 rows
  Array<const float> bias = {};         ///< [outputs], or empty
  Array<const bf16> rounded_bias = {};  ///< the same rounded to nearest, for an epilogue; or empty
  NormTerms norm_terms = {};            ///< with the norm of its input; or empty: the norm has a kernel of its own
};

/// The rows x [n, inputs] of a product: as they are, or x = norm(h).
struct LinearInput {
  AnyMatrix rows;                     ///< x, or h
  const NormWeights* norm = nullptr;  ///< null: none. It must outlive the call
  Array<const Moments> moments = {};  ///< of h, [n, moment_groups(inputs)]
  AnyMatrix normalised = {};          ///< weight ∘ h, in memory for norm(h), which may be formed or not
  NormStatistics statistics = {};     ///< memory for those of h, which may be formed or not

  LinearInput(AnyMatrix x) : rows(x) {}
  LinearInput(AnyMatrix h, const NormWeights& norm_of_h, Array<const Moments> moments_of_h, AnyMatrix scaled_rows_of_h,
              const NormStatistics& statistics_memory)
      : rows(h), norm(&norm_of_h), moments(moments_of_h), normalised(scaled_rows_of_h), statistics(statistics_memory) {}
};

/// The rows of the result [n, outputs]: y as it is, or residual + y. y is rounded to the type of the rows before it is
/// added, as separate kernels round it.
struct LinearOutput {
  AnyMatrix rows;               ///< y, or the sum, in other memory than the residual
  AnyMatrix residual = {};      ///< without data: none
  Array<Moments> moments = {};  ///< of the sum, [n, moment_groups(outputs)]
  ScaledRows scaled = {};       ///< formed of the sum, with the weight of the norm after it

  LinearOutput(AnyMatrix y) : rows(y) {}
  LinearOutput(AnyMatrix sum, AnyMatrix addend, Array<Moments> moments_of_sum, const ScaledRows& scaled_sum)
      : rows(sum), residual(addend), moments(moments_of_sum), scaled(scaled_sum) {}
};

}  // namespace weft::kernels

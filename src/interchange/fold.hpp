// SPDX-License-Identifier: Apache-2.0
//
// Folds the normalisation of activations into the weights, so that they apply to raw inputs x and give raw outputs y.
// With x~ = (x - m) * u of the inputs and y~ = (y - n) * v of the targets, per layer and dimension:
//
//   W_enc' = W_enc diag(u)                b_enc' = b_enc - W_enc' m
//   w_dec' (s -> t) = w_dec / v_t         b_dec' = b_dec / v + n
//   W_skip' = diag(1 / v) W_skip diag(u)  and then b_dec' -= W_skip' m
//
// Pre-activations, thresholds and activations stay the same. Decoders tied per target stay tied; decoders tied per
// source stay tied where v is one.
#pragma once

#include <vector>

#include "dataset/activations/statistics.hpp"
#include "interchange/rows.hpp"
#include "kernels/array.hpp"

namespace weft::interchange {

class FoldedRows : public RowSource {
 public:
  /// `source` must outlive this. `matrices`: the type in which W_enc' and W_skip' will be stored. Biases are formed
  /// from the rounded matrices, so that rounding errors multiply x - m and not x.
  FoldedRows(const RowSource& source, dataset::Normalisation normalisation, kernels::Scalar matrices)
      : source_(source), normalisation_(std::move(normalisation)), matrices_(matrices) {}

  const Contents& contents() const override { return source_.contents(); }
  void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const override;

 private:
  /// Returns the sums over the columns of W' (encoder or skip, as stored) times the input means, [rows.size()].
  std::vector<double> times_means(Part part, std::int64_t layer, parallel::Range rows) const;

  const RowSource& source_;
  dataset::Normalisation normalisation_;
  kernels::Scalar matrices_;
};

}  // namespace weft::interchange

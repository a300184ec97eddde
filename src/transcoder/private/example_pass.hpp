// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward pass of a transcoder over the rows of examples; passes the rows from which gradients are formed
// to a GradientSink:
//
//   z_s = x_s W_enc,sᵀ + b_s     a_s = f(z_s)     y^_t = sum over s <= t of a_s W_dec,s[t] + b_t
//   g = factor (y^ - y)
//
//   W_dec,s    product     inputs g[:, targets of s], gradients a_s         dW = a_sᵀ g
//   W_enc,s    product     inputs x_s, gradients dz_s                       dW = dz_sᵀ x_s
//   b_s        column sum  dz_s          theta_s  column sum  gradient of the threshold by each row
//   b_dec      column sum  g
//
// The pass is dense in the features and unfused, in fp32: activations of all features are in memory. Every row is
// computed independently, so that the gradient of an example does not depend on the others of a micro-batch.
#pragma once

#include <cstdint>

#include "kernels/privacy/examples.hpp"
#include "model/gradient_sink.hpp"
#include "model/step_arena.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

class ExamplePass {
 public:
  struct Buffers {
    /// rows: largest number of rows of a micro-batch.
    Buffers(const Shape&, std::int64_t rows, model::StepArena&);
    kernels::Array<float> inputs, targets;            ///< [rows, L * d] normalised
    kernels::Array<float> preactivations;             ///< [rows, L * F]; with thresholds, else the same memory as
    kernels::Array<float> activations;                ///< [rows, L * F]
    kernels::Array<float> reconstruction, gradients;  ///< [rows, L * d]
    kernels::Array<float> activation_gradient;        ///< [rows, F] of one layer
    kernels::Array<float> threshold_gradient;         ///< [rows, F] of one layer; only with thresholds
    kernels::Array<float> bounds;                     ///< [F]; only with thresholds
    kernels::Array<float> weights;                    ///< weights of a matrix in fp32, room for the largest
    kernels::Array<double> loss_sums;                 ///< [3 * L]
    kernels::Array<std::int32_t> flag;                ///< [1]
    kernels::Array<std::byte> loss_workspace, product_workspace;
  };

  /// The references must outlive the object.
  ExamplePass(const Configuration&, const Model&, const NormalisationOnDevice&, const kernels::Execution&,
              model::StepArena&);

  /// Takes the rows of a micro-batch as stored, where the kernels reach them. A value that is not finite does
  /// not affect other rows.
  void load(kernels::AnyMatrix inputs, kernels::AnyMatrix targets);
  /// Runs both passes on rows [begin, end) of the micro-batch, which `examples` delimits. `step`: step of the run,
  /// from 1. May be called again with the same rows, and gives the same bits.
  void run(parallel::Range rows, const kernels::Examples& examples, std::int64_t step, model::GradientSink&);

 private:
  void activate(std::int64_t layer, parallel::Range rows, std::int64_t step);
  void encode(parallel::Range rows, std::int64_t step);
  void decode(parallel::Range rows);
  void backward(parallel::Range rows, const kernels::Examples&, std::int64_t step, model::GradientSink&);
  kernels::AnyMatrix weights_of(const kernels::ParameterRows&);
  kernels::Matrix<float> of_layer(const kernels::Array<float>& all, std::int64_t layer, parallel::Range rows) const;
  kernels::AnyMatrix wide(const kernels::Array<float>& all, parallel::Range rows) const;
  kernels::JumpRule jump_rule_at(std::int64_t step) const;

  const Configuration configuration_;
  const Model& model_;
  const NormalisationOnDevice& normalisation_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder

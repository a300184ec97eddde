// SPDX-License-Identifier: Apache-2.0
//
// The interface between a backward pass and the gradients of parameters. An operation of the backward pass does not
// form the gradient of its parameter; it hands the rows from which the gradient is formed to a GradientSink:
//
//   y_n = W x_n        matrix W [out, in]      dW = Gᵀ X
//   y_n = x_n + b      vector b [out]          db_j = sum over n of G[n, j]
//   y_n = g ∘ x_n      vector g [out]          dg_j = sum over n of X[n, j] G[n, j]
//   y_n = g ∘ (x_n - shift_n) scale_n          dg_j = sum over n of (X[n, j] - shift[n]) scale[n] G[n, j]
//   y_n = E[id_n]      matrix E [ids, out]     dE[i] = sum over n with id_n = i of G[n]
//
// with X [n, in] the inputs and G [n, out] the gradients of the outputs. What becomes of the rows is the sink's choice:
//
//   accumulate                 gradients are added up over micro-batches (AccumulatingSink)
//   norms of examples          the first pass of two-pass clipping needs no gradient, only its norm per example
//   store and form later       rows are kept until the clipping factors of the examples are known
//
// The first is declared below; the other two need the rows of each example, which `GradientRows::examples` delimits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/memory.hpp"
#include "kernels/array.hpp"
#include "kernels/gemm/fp8.hpp"
#include "kernels/privacy/examples.hpp"
#include "model/parameters.hpp"

namespace weft::model {

/// Operands of a gradient in 8 bits, transposed (kernels/gemm/fp8.hpp).
struct CodedOperands {
  kernels::CodedMatrix inputs;     ///< [in, n]; without data: there are none
  kernels::CodedMatrix gradients;  ///< [out, n]
  kernels::Array<std::byte> workspace = {};

  bool any() const { return inputs.codes.data != nullptr; }
};

/// What one operation leaves for the gradient of one parameter. On a process axis that cuts the parameter, inputs and
/// gradients are those of this rank's part.
struct GradientRows {
  enum class Form {
    product,     ///< inputs [n, in], gradients [n, out] or [n, ParameterSpec::rows_in_memory(out)], zero after `out`
    column_sum,  ///< gradients [n, out]
    column_product,  ///< inputs and gradients [n, out]
    lookup,          ///< ids [n], gradients [n, out]
  } form = Form::product;
  std::size_t parameter = 0;          ///< its number in Parameters
  kernels::AnyMatrix inputs = {};     ///< X, fp32, bf16 or fp16
  kernels::AnyMatrix gradients = {};  ///< G, fp32, bf16 or fp16
  kernels::Array<const std::uint32_t> ids = {};
  /// Empty if no sink needs examples.
  kernels::Examples examples = {};
  std::int64_t first_example = 0;  ///< number of example 0 in the micro-batch
  /// Parameters [parameter, parameter + count) whose outputs are adjacent get their gradients from one product:
  /// members of one group (ParameterSpec::group), not transposed.
  std::size_t count = 1;
  /// Shift and scale of column_product, [n] or without data (0 and 1): with the mean and inverse deviation of its rows,
  /// the gain of a norm has the rows before the norm as its inputs.
  kernels::Array<const float> row_shift = {};
  kernels::Array<const float> row_scale = {};
  /// True if the memory of the rows of a product or lookup stays unchanged until `end_micro_batch` and what follows it:
  /// the next forward pass, or rows that are formed again. Other memory of rows may be reused by work that is enqueued
  /// after `take`. Ids stay.
  bool inputs_stay = false, gradients_stay = false;
  /// Operands of a product, for a sink that adds up: it does not read the elements of inputs and gradients then.
  CodedOperands coded = {};
};

class GradientSink {
 public:
  virtual ~GradientSink() = default;

  /// Takes rows. Work is enqueued on the sink's execution, in the order of the calls; the order is the same in every
  /// step. The one virtual call per operation is made on the host, never in a kernel.
  virtual void take(const GradientRows&) = 0;
  /// No more rows of this micro-batch are of parameters from `first` on. `first` falls from call to call.
  virtual void complete_from(std::size_t /*first*/) {}
  /// After the last operation of a micro-batch.
  virtual void end_micro_batch() {}
  /// True if a row of column_sum may be the sum of several rows of one example, where an operation has formed such sums
  /// in passing: `examples` then counts sums. False for a sink that has no use for the gradients of vectors.
  virtual bool takes_sums() const { return false; }
};

/// Gradients of matrices that a rank keeps during a step.
enum class KeptGradients {
  of_held_rows,   ///< reduced once per step
  of_owned_rows,  ///< reduced in every micro-batch; those of held rows are in memory that units share (UnitMemory)
};

/// Adds the gradients of all micro-batches of a step in fp32; those of frozen parameters are not formed. Gradients have
/// the stored shape of their parameters (parameters.hpp). Deterministic: the same rows give the same bits. Products are
/// those of the dense library (kernels/gemm/gemm.hpp), so a part of a cut matrix differs from the whole one by
/// rounding.
class AccumulatingSink final : public GradientSink {
 public:
  /// Allocates gradients for all trained parameters on the device and clears them. `max_rows`: the most rows that one
  /// `take` brings. `parameters` must outlive the sink.
  AccumulatingSink(const Parameters& parameters, const kernels::Execution&, std::int64_t max_rows,
                   KeptGradients kept = KeptGradients::of_held_rows);

  /// What the constructor allocates on a rank.
  static std::int64_t bytes(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t rank,
                            std::int64_t max_rows, KeptGradients kept = KeptGradients::of_held_rows);

  /// Floats of the gradients that a rank keeps, a multiple of kRow.
  static std::int64_t elements(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t rank,
                               KeptGradients kept = KeptGradients::of_held_rows);

  /// Floats of `vectors`.
  static std::int64_t vector_elements(std::span<const ParameterSpec> specs, const parallel::GridShape&,
                                      std::int64_t rank);

  /// Before the first micro-batch of a step. The first rows of a parameter then overwrite its gradient instead of
  /// adding to it; gradients are defined again after `end_micro_batch`, which clears those that got no rows.
  void clear();
  KeptGradients kept() const { return kept_; }
  /// `then(first)` is called when the gradients of parameters from `first` on are complete: in the last micro-batch of
  /// a step they may be reduced from there; with KeptGradients::of_owned_rows they must be in every one. Null: nothing.
  void when_complete(std::function<void(std::size_t first)> then) { when_complete_ = std::move(then); }
  /// No effect for a frozen parameter. Throws Error(internal) if the rows do not fit the parameter.
  void take(const GradientRows&) override;
  void complete_from(std::size_t first) override;
  void end_micro_batch() override;
  bool takes_sums() const override { return true; }

  /// Gradient of the owned rows of a matrix, [owned, columns]. On a rank that owns only a part of its held rows it is
  /// formed from `held` of all ranks (DataParallel), in descending order of the parameters: they may lie where the
  /// gradients of the same or a later matrix were.
  kernels::Matrix<float> matrix(std::size_t parameter) const;
  /// Gradient of all held rows, from the rows that this rank took.
  kernels::Matrix<float> held(std::size_t parameter) const;
  /// Begins a sum that is formed without `take`: that of the held rows of parameters [parameter, parameter + count) is
  /// zero if nothing has been added to it yet. Returns the memory of the first one, as `held`.
  kernels::Matrix<float> begin_sum(std::size_t parameter, std::size_t count = 1);
  /// Gradient of a vector [held].
  kernels::Array<float> vector(std::size_t parameter) const;
  /// Gradients of all vectors, with zeros between them.
  kernels::Array<float> vectors() const;
  /// Gradients of the vectors for which each rank of the tensor axis has a part of the sum
  /// (ParameterSpec::partial_gradient).
  kernels::Array<float> partial_vectors() const;
  static std::int64_t partial_elements(std::span<const ParameterSpec> specs, const parallel::GridShape&,
                                       std::int64_t rank);
  /// On a grid that cuts parameters: which of the rows of `matrix_rows` and, numbered after them, `vector_rows` are of
  /// parameters that nothing cuts. All ranks of the tensor axis have them, with the same gradients.
  std::vector<parallel::Range> repeated_rows() const;
  /// Zeros between the gradients of owned rows, where other gradients were.
  void clear_gaps();
  /// The gradients of owned rows, and of vectors, with zeros between them, as rows of kRow numbers: for norms.
  kernels::Matrix<const float> matrix_rows() const;
  kernels::Matrix<const float> vector_rows() const;
  static constexpr std::int64_t kRow = 4096;

 private:
  const Parameters& parameters_;
  kernels::Execution execution_;
  std::int64_t held_by(const GradientRows&) const;
  bool is_first(const GradientRows&);
  void zero(std::size_t parameter);
  bool is_shared(std::size_t parameter) const;
  std::int64_t first_owned_row() const { return owned_begin_ / kRow; }

  const KeptGradients kept_;
  std::vector<std::int64_t> begin_, owned_;  // by parameter, of held and owned rows, in elements of gradients_
  std::int64_t elements_ = 0;                // of gradients_ that are kept: the first ones
  std::int64_t owned_begin_ = 0, matrices_end_ = 0;
  parallel::Range vectors_, partial_;      // elements of gradients_
  std::vector<parallel::Range> repeated_;  // likewise
  std::vector<bool> cleared_;              // by parameter: the next rows overwrite its gradient
  std::size_t complete_ = 0;               // parameters from here on get no more rows of this micro-batch
  std::function<void(std::size_t first)> when_complete_;
  device::Buffer<float> gradients_;
  device::Buffer<std::byte> workspace_;  // workspace of products
};

}  // namespace weft::model

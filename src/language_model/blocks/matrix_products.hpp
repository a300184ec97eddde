// SPDX-License-Identifier: Apache-2.0
//
// The products of a transformer with its parameters: forward, backward, and the rows of their gradients. What a product
// reads in place of a parameter (weights in fp16 or 8 bits, packed weights in bf16, biases in bf16) and its low-rank
// adapters are known here alone.
#pragma once

#include <limits>
#include <vector>

#include "kernels/bf16.hpp"
#include "kernels/language/linear/linear.hpp"
#include "language_model/blocks/coded_products.hpp"
#include "language_model/blocks/context.hpp"

namespace weft::language_model {

/// Largest number of adapters of one product: query, key and value.
constexpr std::int64_t kMostAdapters = 3;

class Products {
 public:
  struct Buffers {
    /// The parameters are those of the rank's part of the model. head_rows: most rows of a product with the head.
    Buffers(const TransformerSettings&, const ParameterList&, std::int64_t head_rows, model::StepArena&);
    // Buffers for the adapters of a product, [rows, parts * rank] and, with dropout, [rows, inputs].
    kernels::AnyMatrix adapter_rows, adapter_gradient, adapter_input;
    CodedProducts::Buffers coded;
    kernels::Array<std::byte> workspace;
    kernels::Array<kernels::bf16> unpacked_weights;  ///< memory for those of one product, if the blocks' are packed
    /// With fp16 activations the weights in fp16, as stored, in the order of Layers::linears; if weights are gathered,
    /// those of the head and of one block.
    kernels::Array<kernels::half> half_weights;
    kernels::Array<kernels::bf16> rounded_biases;      ///< of all products, where their kernels take them in bf16
    kernels::Array<kernels::RoundedCopy> bias_copies;  ///< how they are formed
    std::vector<kernels::Array<float>> norm_terms;     ///< s | c of products that apply norms, in their order
  };

  /// The context must outlive this object.
  Products(const Context&, const Buffers&);

  /// True if `prepare` reads all weights.
  bool copies_weights() const { return copies_at_once(); }
  /// Forms what products read in place of the parameters. To be called after each change of the parameters.
  void prepare();
  /// Forms the copies of the weights of a unit, if they are gathered and not there. To be called before each use of a
  /// unit, when its weights are there.
  void prepare_unit(std::size_t unit);
  /// Forms the terms with which products apply the norms of their inputs. All weights must be there. They are valid
  /// until the next call of `prepare`.
  void prepare_norms();
  /// True if products can apply the norms.
  bool applies_norms() const { return has_norm_terms_ || buffers_.norm_terms.empty(); }

  /// Those in 8 bits, in passes with Pass::coded.
  CodedProducts& coded() { return coded_; }
  void keep_input(const Linear& linear, kernels::Array<std::uint8_t> codes) { coded_.keep_input(linear, codes); }
  /// True if the product is in 8 bits in this pass. Its x is to be coded before `multiply`.
  bool is_coded(const Pass& pass, const Linear& linear) const { return pass.coded && coded_.has(linear); }
  void code_input(const Pass& pass, const Linear& linear, kernels::AnyMatrix x) {
    if (is_coded(pass, linear)) coded_.code_input(linear, x);
  }
  /// The same for x that is the activation of `hidden`; without codes, or where a step needs it, forms `activated`.
  void activate(const Pass&, const Linear&, MlpActivation, kernels::AnyMatrix hidden, kernels::AnyMatrix activated);

  /// Computes y = x Wᵀ + b. A matrix that is stored transposed is divided by its inputs: y is a sum over the ranks, to
  /// be awaited. Norms and residual rows in x and y: of joined passes alone.
  void multiply(const Pass&, const Linear&, const kernels::LinearInput& x, const kernels::LinearOutput& y);
  /// Computes dx = dy W; with adapters hands the rows of their gradients to the sink. A matrix that is divided by its
  /// outputs gives a sum over the ranks, to be awaited. dx is neither x nor dy. Returns dy, as give_gradients takes it.
  OutputGradient propagate(const Pass&, const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix dy,
                           kernels::AnyMatrix dx);
  /// Hands the rows of dW = dyᵀ x and db to the sink. first_row: of the rows in the micro-batch.
  void give_gradients(const Pass&, const Linear&, kernels::AnyMatrix x, const OutputGradient& dy,
                      std::int64_t first_row = 0) const;

  /// Computes hidden = x Wᵀ + b and its activation, which is the input of `next`. `hidden` need not be formed if no
  /// backward pass follows.
  void multiply_activated(const Pass&, const Linear&, const Linear& next, const kernels::LinearInput& x, MlpActivation,
                          kernels::AnyMatrix hidden, kernels::AnyMatrix activated);
  /// Backward pass of a product whose input is the activation of `hidden`. Returns the gradient of `hidden`: in
  /// `gradient` if one kernel forms it; else it replaces `hidden`, and `gradient` is the gradient of the activation.
  kernels::AnyMatrix propagate_activated(const Pass&, const Linear&, kernels::AnyMatrix activated,
                                         kernels::AnyMatrix dy, MlpActivation, kernels::AnyMatrix hidden,
                                         kernels::AnyMatrix gradient);
  /// `propagate` of a product in 8 bits whose outputs `hidden` have an activation with this gradient [rows, D]. dy
  /// takes the place of `hidden`, if it is formed.
  OutputGradient propagate_coded(const Linear& linear, MlpActivation activation, kernels::AnyMatrix hidden,
                                 kernels::AnyMatrix gradient, kernels::AnyMatrix dx) {
    return coded_.propagate_activation(linear, activation, hidden, gradient, dx, buffers_.workspace);
  }

  const Context& context() const { return context_; }

 private:
  static constexpr std::size_t kNoUnit = std::numeric_limits<std::size_t>::max();

  const LoraSettings& lora() const { return context_.settings.architecture.lora; }
  bool adapts(const Linear& linear) const { return context_.settings.adapters && linear.adapter != kNoParameter; }
  bool applies_norm(const Linear& linear) const {
    return linear.index < buffers_.norm_terms.size() && linear.norm && !linear.is_packed();
  }
  bool copies_at_once() const { return !half_weights_.empty() && !context_.settings.gathers_weights; }
  std::size_t unit_of(const Linear& linear) const { return context_.layers.parameters().specs()[linear.weight].unit; }
  kernels::LinearWeights weights_of(const Linear&) const;
  kernels::LinearWeights forward_weights(const Pass&, const Linear&) const;
  void place_biases();
  void place_half_weights();
  void form_half_weights(const Linear&);

  void adapt(const Pass&, const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix y);
  void adapt_backward(const Pass&, const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix dy, kernels::AnyMatrix dx);
  kernels::AnyMatrix thin_rows(kernels::AnyMatrix memory, const Linear&, std::int64_t rows) const;
  kernels::AnyMatrix adapter_rows(const Pass&, const Linear&, kernels::AnyMatrix input);
  kernels::AnyMatrix adapter_input(const Pass&, const Linear&, kernels::AnyMatrix x);
  void drop_adapter(const Pass&, const Linear&, kernels::AnyMatrix);

  const Context& context_;
  const Buffers buffers_;
  std::vector<kernels::Array<const kernels::bf16>> rounded_biases_;  // by parameter; empty: none
  std::int64_t largest_bias_ = 0;
  bool has_norm_terms_ = false;
  std::vector<kernels::Matrix<kernels::half>> half_weights_;  // by Linear::index; empty: none
  std::size_t half_head_ = kNoUnit, half_block_ = kNoUnit;    // units whose copies are there, if they are gathered
  CodedProducts coded_;
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The interface of a sublayer of a block: what comes between the norm of the residual stream and the sum with it
// (residual_sublayer.hpp). A sublayer declares its parameters and products, takes memory for its rows, and computes
//
//   forward    inner = f(x)      up to the input of its last product
//   output     y = W inner       starts that product: a sum over the ranks of the tensor axis
//   recompute  forms again the rows of `forward` that memory.recompute = "activation" or "norm" does not keep
//   backward   dx from dy; hands the rows of the gradients to the sink
//
// Everything that knows the kinds of sublayers is in block_list.cpp: names, LoRA targets, memory, work and the plan
// follow from the declarations.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "language_model/blocks/block_memory.hpp"
#include "language_model/blocks/matrix_products.hpp"
#include "language_model/blocks/parameter_list.hpp"
#include "run/profile.hpp"

namespace weft::language_model {

/// Work of a sublayer in one phase, beside its products, per token: bytes with activations of one byte, operations.
struct SublayerWork {
  const char* phase = "";
  run::Work forward, backward;
  /// memory.recompute from which on the forward pass is computed again.
  Recompute again = Recompute::block;
};

class Sublayer {
 public:
  /// name: of the kind, "attention". The names of its parameters begin with that of the block and this one.
  Sublayer(const Architecture& architecture, std::int64_t block, std::string kind)
      : architecture_(architecture), block_(block), kind_(std::move(kind)), prefix_(block_name(block) + kind_ + "/") {}
  Sublayer(const Sublayer&) = delete;
  virtual ~Sublayer() = default;

  std::int64_t block() const { return block_; }
  const std::string& kind() const { return kind_; }

  /// Adds its parameters and products to the list.
  virtual void declare(ParameterList&) const = 0;
  /// Work in sequences of `length` tokens.
  virtual std::vector<SublayerWork> work(double length) const = 0;
  /// Takes the memory of its rows. later: the sublayer of this kind in a later block, which took its memory before and
  /// whose backward pass is complete when that of this one begins; null: none.
  virtual void take(BlockMemory&, const Sublayer* later) = 0;
  /// Finds its parameters. Both arguments must outlive this object.
  virtual void bind(const Layers&, Products&) = 0;

  /// The product that reads x.
  virtual const Linear& input_product() const = 0;
  /// x [rows, C], those of the tokens of the pass. May be called for parts of a micro-batch in turn.
  virtual void forward(const Pass&, const kernels::LinearInput& x) = 0;
  /// Starts y [rows, C], after `forward`: to be awaited.
  virtual void output(const Pass&, const kernels::LinearOutput& y) = 0;
  virtual void recompute(const Pass&) = 0;
  /// Starts dx [rows, C]: to be awaited. x: the rows of `forward`.
  virtual void backward(const Pass&, kernels::AnyMatrix x, const OutputGradient& dy, kernels::AnyMatrix dx) = 0;

 protected:
  const ModelSettings& model() const { return architecture_.model; }
  const Architecture& architecture() const { return architecture_; }  ///< of the whole model, or of a rank's part
  const std::string& prefix() const { return prefix_; }               ///< "block_3/attention/"

 private:
  const Architecture architecture_;
  const std::int64_t block_;
  const std::string kind_, prefix_;
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The clipped sum of a private step, S = sum over examples b of c_b g_b, and the noise on it (Abadi et al. 2016, arXiv
// 1607.00133):
//
//   c_b = clip factor of |g_b|             S += sum over b of c_b g_b         g = (S + sigma C xi) / expected batch
//
//   clipping.begin();
//   for each micro-batch: clipping.add(batch);           // passes over the examples, with sinks of this module
//   update.form_norm(flags, [&] { clipping.add_noise(…); });   // after the sum over the ranks of the data axis
//
// g_b is the gradient of the loss of example b alone, of all parameters. Norms are those of whole examples. Ranks of
// the data axis hold different examples and whole matrices: no norm is ever exchanged between them. Ranks of the tensor
// axis hold parts of the same examples' gradients: squares of what they hold apart are added over them before the
// factors are formed, what all of them hold counts once.
//
//   two_pass       norms in one backward pass, the clipped sum in a second one that repeats its bits
//   book_keeping   one pass: inputs and output gradients of all products are kept until the factors are known
//   materialise    one pass: dW_b of each example in bf16. The norm is that of the rounded values, which are summed
//   naive          examples one by one, each gradient in memory. The oracle of the others
//
// Vectors (biases, gains of norms) take one form in all modes: the sums of each example, [examples, size], are formed
// in the first pass and kept.
//
// Invariant. Every element of the parameters is covered by exactly one norm term of each example; `add` counts this
// and throws otherwise. A model whose backward pass leaves out a parameter is refused, not trained without protection.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/privacy/clipping.hpp"
#include "kernels/privacy/noise.hpp"
#include "kernels/privacy/norms.hpp"
#include "privacy/settings.hpp"
#include "training/gradient_sink.hpp"
#include "training/step_arena.hpp"
#include "training/tensor_axis.hpp"

namespace weft::privacy {

/// The parts of the parameters that are clipped by themselves: part[parameter], to C / sqrt(count) each.
struct ClipParts {
  ClipParts(std::span<const training::ParameterSpec>, Scheme);
  std::vector<std::size_t> part;
  std::size_t count = 1;
};

/// What the memory of Clipping follows from.
struct ClippingShape {
  kernels::ExampleSizes examples;                ///< of a micro-batch; rows: of products and lookups
  std::int64_t sum_rows = 1;                     ///< most rows of column_sum and column_product per row of a product
  kernels::Scalar type = kernels::Scalar::fp32;  ///< of inputs and output gradients
  std::int64_t kept_columns = 0;                 ///< of the rows that are copied in order to keep them
  /// Parameters that are tables of a lookup and of no product: [ids, columns].
  std::vector<std::size_t> tables = {};
  /// The parameter that is the table of a lookup and the matrix of a product.
  std::optional<std::size_t> tied = {};
  std::vector<std::int64_t> held = {};  ///< by parameter: rows that this rank holds
};

/// "two_pass, a second backward pass". Not of Mode::automatic.
const char* to_text(Mode);
/// Which algorithm forms the norms of each product: "512 x 128 width, …".
std::string to_text(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&);

class Clipping {
 public:
  struct Buffers {
    Buffers() = default;
    /// settings.mode is not automatic unless settings.algorithm is naive.
    Buffers(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&, training::StepArena&);
    kernels::Array<double> norms;          ///< squares, [parts, examples]
    kernels::Array<float> factors;         ///< [parts, examples]
    kernels::Array<float> vectors;         ///< gradients of all vectors, [examples, elements]
    kernels::Array<float> partial;         ///< likewise, of vectors with partial gradients on a tensor axis
    kernels::Array<float> tied_rows;       ///< [rows, columns] (kernels::add_tied_rows)
    kernels::Array<std::byte> kept;        ///< rows until the factors are known
    kernels::Array<kernels::bf16> stored;  ///< materialise: [examples, elements] of each product
    kernels::Array<std::byte> workspace;
    kernels::Array<double> squares, totals;  ///< naive: of the rows of a gradient
  };

  struct MicroBatch {
    kernels::Examples examples = {};               ///< with the rows of products and lookups
    kernels::Array<const std::uint32_t> ids = {};  ///< of the lookup of the tied table
    /// Forward and backward pass over examples [begin, end) of the micro-batch, with the gradients of their losses. It
    /// may be called twice with the same range, and gives the same bits.
    std::function<void(parallel::Range examples, training::GradientSink&)> pass;
    std::function<void()> passed = {};  ///< after the first pass, before the clipped sum: of timers
  };

  /// `sum` gets S; of vectors with partial gradients rank 0 of the tensor axis gets it, the others 0. All references
  /// must outlive the object; tensor null: one rank has the whole model.
  Clipping(const training::Parameters&, training::AccumulatingSink& sum, const Settings&, const ClippingShape&,
           const kernels::Execution&, Buffers&&, training::TensorAxis* tensor);
  ~Clipping();

  /// Clears the sum. Before the first micro-batch of a step, also of a step without any.
  void begin();
  /// Adds the clipped gradients of a micro-batch. Collective over the tensor axis, whose ranks have the same examples.
  /// Throws Error(internal) if a parameter is not covered.
  void add(const MicroBatch&);
  /// After the sum over ranks: the gradients of the owned rows become (S + deviation xi) / expected, xi standard normal
  /// by (key, update, parameter, global element): once per update, the same on any grid.
  void add_noise(const kernels::NoiseKey& key, std::uint64_t update, double noise_multiplier, double expected);

  /// The largest norm of an example's contribution: the sensitivity of S if one example is added or removed.
  double sensitivity() const { return settings_.clip; }

  /// Device memory of the naive mode that is not in the arena, on a rank.
  static std::int64_t own_bytes(const Settings&, std::span<const training::ParameterSpec>, const parallel::GridShape&,
                                std::int64_t rank, const ClippingShape&);
  /// The most bytes that a rank of the tensor axis sends to each other one at a time.
  static std::int64_t exchanged_bytes(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&);

 private:
  class NormSink;
  class SumSink;
  /// Of one parameter in this micro-batch: examples whose norm terms have come, of products or vectors and of lookups.
  struct Covered {
    std::int64_t by_rows = 0, by_lookup = 0;
    std::int64_t formed_rows = 0;  ///< of the gradient of a product
  };
  /// Vectors of one part, from `parameter` on, that lie one behind the other: of an example and in the sum.
  struct VectorRun {
    std::size_t parameter = 0;
    kernels::Array<float> sum;
  };

  void take(const training::GradientRows&);
  void take_norms(const training::GradientRows&);
  void take_vector(const training::GradientRows&);
  void take_product(const training::GradientRows&);
  void take_lookup(const training::GradientRows&);
  void add_clipped(const training::GradientRows&);
  void add_vector_norms();
  void add_vectors();
  void add_stored();
  void add_partial_vectors();
  void form_factors();
  void check_coverage() const;
  void add_naive(const MicroBatch&);
  training::GradientRows kept(training::GradientRows);
  kernels::AnyMatrix formed(const training::GradientRows&) const;
  void sum_later(const training::GradientRows&);
  kernels::AnyMatrix keep(const kernels::AnyMatrix&);

  kernels::Array<double> norms_of(std::size_t parameter, std::int64_t first, std::int64_t count) const;
  kernels::Array<double> norms_of(const training::GradientRows&) const;
  kernels::Array<const float> factors_of(std::size_t parameter, std::int64_t first, std::int64_t count) const;
  kernels::Matrix<float> vectors_of(std::size_t parameter, std::int64_t columns) const;
  kernels::Matrix<kernels::bf16> stored_of(std::size_t parameter, std::int64_t elements) const;
  std::int64_t held_by(const training::GradientRows&) const;
  std::int64_t first_row(const training::GradientRows&) const;
  bool is_tied(std::size_t parameter) const { return shape_.tied == parameter; }
  bool counts(std::size_t parameter) const;
  bool is_partial(std::size_t parameter) const;
  bool materialises() const { return settings_.mode == Mode::materialise; }
  double part_clip() const;

  const training::Parameters& parameters_;
  training::AccumulatingSink& sum_;
  const Settings settings_;
  const ClippingShape shape_;
  const kernels::Execution execution_;
  const ClipParts parts_;
  Buffers buffers_;
  training::TensorAxis* const tensor_;  // null: one rank has the whole model
  std::vector<std::int64_t> begin_;     // by parameter: in `vectors`, `partial` or `stored`, elements of one example
  std::vector<VectorRun> vector_runs_;
  const MicroBatch* batch_ = nullptr;
  std::vector<Covered> covered_;  // by parameter
  // Of this micro-batch, with copies of their rows: norms are formed later; clipped sums are formed later.
  std::vector<training::GradientRows> waiting_, summed_;
  std::int64_t kept_bytes_ = 0;
  struct {
    const void* from = nullptr;
    kernels::AnyMatrix copy;
  } last_kept_;                                    // gradients
  std::optional<training::AccumulatingSink> one_;  // naive: the gradient of one example
};

}  // namespace weft::privacy

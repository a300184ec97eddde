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
// g_b is the gradient of the loss of example b alone, of all parameters. Norms are those of whole examples: ranks of
// the data axis hold different examples and whole matrices, so no norm is ever exchanged between them. Ranks of the
// tensor axis hold parts of the matrices and the same examples: the squares of their parts are added up, those of
// parameters that nothing cuts by rank 0 alone. Of a vector of which each has a part of the gradient
// (ParameterSpec::partial_gradient), the gradients of the examples are added up before they are squared.
//
//   two_pass       norms in one backward pass, the clipped sum in a second one that repeats its bits
//   book_keeping   one pass: inputs and output gradients of all products are kept until the factors are known; with
//                  scheme = "per_layer" or "group", until those of the parts of a block are known
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
#include <string_view>
#include <vector>

#include "kernels/privacy/clipping.hpp"
#include "kernels/privacy/noise.hpp"
#include "kernels/privacy/norms.hpp"
#include "privacy/settings.hpp"
#include "training/gradient_sink.hpp"
#include "training/step_arena.hpp"
#include "training/tensor_axis.hpp"

namespace weft::privacy {

/// The parts of the parameters that are clipped by themselves: part[parameter], to C / sqrt(count) each. Numbered in
/// the order of the parameters; those of a part follow one another.
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
  std::int64_t tensor_ranks = 1;  ///< ranks among which matrices are divided
};

// In the following, specs have the shapes of what a rank holds: on a tensor axis, of a part of the model.

/// Which algorithm forms the norms of each product: "512 x 128 width, …".
std::string to_text(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&);
/// Of all products, in a whole micro-batch. Operations are floating-point ones.
struct ProductWork {
  double direct = 0, gram = 0;  ///< operations of norms, by the algorithm that is chosen for each product
  double operations = 0;        ///< of the products of all rows: of the sums, or of the gradients of records
  double stored_elements = 0;   ///< of the gradients of all records
};
ProductWork product_work(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&);
/// The most that Clipping gathers from a rank of the tensor axis at a time, bytes.
std::int64_t gathered_bytes(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&);

class Clipping {
 public:
  struct Buffers {
    Buffers() = default;
    /// settings.mode is not automatic unless settings.algorithm is naive.
    Buffers(const Settings&, std::span<const training::ParameterSpec>, const ClippingShape&, training::StepArena&);
    kernels::Array<double> norms;          ///< squares, [parts + 1, examples]; the last: those that are not counted
    kernels::Array<float> factors;         ///< [parts, examples]
    kernels::Array<float> vectors;         ///< gradients of all vectors, [examples, elements]
    kernels::Array<float> partial;         ///< gradients of vectors with partial ones, [examples, elements]
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
    /// Of timers, before the work that it names: "norms of records", "clipping factors", "clipped sums", "exchange".
    std::function<void(std::string_view)> phase = {};
  };

  /// `sum` gets S; of vectors with partial gradients, the part of this rank. It is told when the sums of parameters are
  /// complete for the micro-batch (AccumulatingSink::when_complete), but by the naive mode. tensor: the ranks among
  /// which matrices are divided; null: none. All references must outlive the object.
  Clipping(const training::Parameters&, training::AccumulatingSink& sum, const Settings&, const ClippingShape&,
           const kernels::Execution&, Buffers&&, training::TensorAxis* tensor = nullptr);
  ~Clipping();

  /// Clears the sum. Before the first micro-batch of a step, also of a step without any.
  void begin();
  /// Adds the clipped gradients of a micro-batch. Throws Error(internal) if a parameter is not covered. Collective over
  /// the tensor axis.
  void add(const MicroBatch&);
  /// After the sum over ranks: the gradients of the owned rows become (S + deviation xi) / expected, xi standard normal
  /// by (key, update, parameter, global element): once per update, the same on any grid.
  void add_noise(const kernels::NoiseKey& key, std::uint64_t update, double noise_multiplier, double expected);

  /// The largest norm of an example's contribution: the sensitivity of S if one example is added or removed.
  double sensitivity() const { return settings_.clip; }

  /// Device memory of the naive mode that is not in the arena.
  static std::int64_t own_bytes(const Settings&, std::span<const training::ParameterSpec>, const parallel::GridShape&,
                                const ClippingShape&);

 private:
  class NormSink;
  class SumSink;
  /// Of one parameter in this micro-batch: examples whose norm terms have come, of products or vectors and of lookups.
  struct Covered {
    std::int64_t by_rows = 0, by_lookup = 0;
    std::int64_t formed_rows = 0;  ///< of the gradient of a product
  };
  /// Vectors whose norms go to one row, from `parameter` on, that lie one behind the other: of an example and in the
  /// sum.
  struct VectorRun {
    std::size_t parameter = 0;
    kernels::Array<float> sum;
  };

  void phase(std::string_view name) const;
  void take(const training::GradientRows&);
  void take_norms(const training::GradientRows&);
  void take_vector(const training::GradientRows&);
  void take_product(const training::GradientRows&);
  void take_lookup(const training::GradientRows&);
  void add_clipped(const training::GradientRows&);
  void add_sums();
  void add_stored(std::size_t parameter);
  void add_over_ranks(kernels::Array<double>);
  kernels::Matrix<float> over_ranks(kernels::Matrix<float> partial);
  bool is_partial(std::size_t parameter) const { return tensor_ != nullptr && specs_[parameter].partial_gradient; }
  std::size_t row_of(std::size_t parameter) const;
  void form_factors(std::size_t first);
  void close_from(std::size_t first);
  void check_coverage(std::size_t first) const;
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
  std::int64_t first_row(const training::GradientRows& rows) const {
    return parameters_.parts(rows.parameter).held.begin;
  }
  bool is_tied(std::size_t parameter) const { return shape_.tied == parameter; }
  double part_clip() const;
  /// Most rows that the gradient of a record is a sum over.
  std::int64_t summed_rows() const { return shape_.examples.most_rows * shape_.sum_rows; }

  const training::Parameters& parameters_;
  const std::vector<training::ParameterSpec> specs_;  // with the shapes of what this rank holds
  training::AccumulatingSink& sum_;
  training::TensorAxis* const tensor_;
  const Settings settings_;
  const ClippingShape shape_;
  const kernels::Execution execution_;
  const ClipParts parts_;
  Buffers buffers_;
  std::vector<std::int64_t> begin_;  // by parameter: in `vectors` or `stored`, in elements of one example
  std::vector<VectorRun> vector_runs_;
  const MicroBatch* batch_ = nullptr;
  std::vector<Covered> covered_;  // by parameter
  /// A clipped sum that is formed when the factors are known: from rows, or from the stored gradients of a product.
  struct Later {
    bool is_stored = false;
    std::size_t first = 0, end = 0;  // parameters
    training::GradientRows rows = {};
    std::int64_t kept_bytes = 0;  // with the copies of its rows and of all before it
  };
  // Of this micro-batch: norms are formed later, from copies of the rows; clipped sums are formed later.
  std::vector<training::GradientRows> waiting_;
  std::vector<Later> summed_;
  std::size_t open_ = 0;  // parameters below: their factors are not known
  std::int64_t kept_bytes_ = 0;
  struct {
    const void* from = nullptr;
    kernels::AnyMatrix copy;
  } last_kept_;                                    // gradients
  std::optional<training::AccumulatingSink> one_;  // naive: the gradient of one example
};

}  // namespace weft::privacy

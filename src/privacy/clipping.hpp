// SPDX-License-Identifier: Apache-2.0
//
// The clipped sum of a private step, S = sum over records b of c_b g_b (Abadi et al. 2016, arXiv 1607.00133):
//
//   c_b = clip factor of |g_b|             S += sum over b of c_b g_b
//
// g_b is the gradient of the loss of record b alone, of all parameters. Norms are those of whole records: ranks of the
// data axis hold different records and whole matrices, so no norm is ever exchanged between them. Ranks of the tensor
// axis hold parts of the matrices and the same records: the squares of their parts are added up, those of parameters
// that nothing cuts by rank 0 alone. Of a vector of which each has a part of the gradient
// (ParameterSpec::partial_gradient), the gradients of the records are added up before they are squared.
//
// One class per mode (modes.hpp), each a file:
//
//   materialise    one pass: dW_b of each record in bf16. The norm is that of the rounded values, which are summed
//   book_keeping   one pass: inputs and output gradients of all products are kept until the factors are known; with
//                  scheme = "per_layer" or "group", until those of the parts of a block are known
//   two_pass       norms in one backward pass, the clipped sum in a second one that repeats its bits
//   naive          records one by one, each gradient in memory. The oracle of the others
//
// The first three share norms, factors and coverage (record_norms.hpp). Vectors (biases, gains of norms) take one form
// in all of them: the sums of each record, [records, size], are formed in the first pass and kept.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/privacy/clipped_sums.hpp"
#include "model/gradient_sink.hpp"
#include "model/tensor_axis.hpp"
#include "privacy/clipping_plan.hpp"
#include "run/timers.hpp"

namespace weft::privacy {

/// The records of a micro-batch.
struct MicroBatch {
  kernels::Examples examples = {};               ///< with the rows of products and lookups
  kernels::Array<const std::uint32_t> ids = {};  ///< of the lookup of the tied table

  parallel::Range all() const { return {0, examples.count()}; }
};

/// The backward passes of a model.
class Passes {
 public:
  virtual ~Passes() = default;
  /// Forward and backward pass over records [begin, end) of the micro-batch, with the gradients of their losses. It may
  /// be called twice with the same range, and gives the same bits. An empty range: other ranks have records.
  virtual void pass(parallel::Range records, model::GradientSink&) = 0;
};

class Clipping {
 public:
  virtual ~Clipping() = default;
  /// Adds the clipped gradients of a micro-batch; without records, where other ranks have some. Throws Error(internal)
  /// if a parameter is not covered. Collective over the tensor axis.
  virtual void add(const MicroBatch&, Passes&) = 0;
};

/// Objects that every mode uses. All references must outlive the mode.
struct ClippingContext {
  const model::Parameters& parameters;
  /// Gets S; of vectors with partial gradients, the part of this rank. It is told when the sums of parameters are
  /// complete for the micro-batch (AccumulatingSink::when_complete), but by the naive mode.
  model::AccumulatingSink& sum;
  Settings settings;
  ClippingShape shape;
  kernels::Execution execution;
  model::TensorAxis* tensor = nullptr;  ///< the ranks among which matrices are divided; null: none
  run::Timers* timers = nullptr;        ///< for the phases "norms of records" and those after it; null: not timed

  void phase(std::string_view name) const {
    if (timers != nullptr) timers->phase(name);
  }
};

/// The bound of each of `parts` parts, relative to that of the whole gradient.
double part_share(std::size_t parts);

/// The parameters as this rank clips them.
struct ClippedParameters {
  explicit ClippedParameters(const ClippingContext&);

  /// The row of the norms to which those of this parameter are added: that of its part, or the last one, which is not
  /// counted, if another rank counts it.
  std::size_t row_of(std::size_t parameter) const;
  /// True for a vector of which each rank of the tensor axis has a part of the gradient.
  bool is_partial(std::size_t parameter) const {
    return context.tensor != nullptr && specs[parameter].partial_gradient;
  }
  double part_share() const { return privacy::part_share(parts.count); }
  /// Adds up squares of parts of gradients over the ranks of the tensor axis, in place.
  void add_over_ranks(kernels::Array<double> squares) const;

  const ClippingContext context;
  const std::vector<model::ParameterSpec> specs;  ///< with the shapes of what this rank holds
  const ClipParts parts;
};

kernels::AnyMatrix view(const kernels::Matrix<float>&);
kernels::AnyMatrix view(const kernels::Matrix<kernels::bf16>&);

}  // namespace weft::privacy

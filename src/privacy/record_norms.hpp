// SPDX-License-Identifier: Apache-2.0
//
// Squares of the norms of the records of a micro-batch, and the factors that follow from them: what materialise,
// book_keeping and two_pass share.
//
//   norms.begin(batch);
//   norms.add(rows);             // for all rows of the first pass
//   norms.form_factors();        // then the clipped sums of vectors are complete
//   norms.add_clipped(rows);     // for the rows of products and lookups, whenever a mode has them
//
// Invariant. Every element of the parameters is covered by exactly one norm term of each record; `form_factors` counts
// this and throws otherwise. A model whose backward pass leaves out a parameter is an error, not trained without
// protection.
#pragma once

#include <span>
#include <vector>

#include "privacy/clipping.hpp"

namespace weft::privacy {

class RecordNorms {
 public:
  RecordNorms(const ClippingContext&, ClippingBuffers&&);

  void begin(const MicroBatch&);
  /// Adds the norm terms of rows.
  void add(const model::GradientRows&);
  /// Forms the factors of parameters [first, open()), which are whole parts. Then the clipped sums of their vectors.
  void form_factors(std::size_t first = 0);
  /// First parameter with known factors; those of all parameters below it are not known.
  std::size_t open() const { return open_; }
  /// The first parameter from `first` on such that all below open() and not below it are whole parts.
  std::size_t whole_parts_from(std::size_t first) const;
  /// Adds the clipped sum of the rows of a product or lookup, whose factors are known.
  void add_clipped(const model::GradientRows&);
  /// Tells the sink of the sums which parameters get no more rows if those of `rest` are still to come.
  void complete_before(std::span<const model::GradientRows> rest);

  // Functions for a mode that forms its own norms.
  /// Rows for the parameter as stored: for a transposed matrix, the operands of the product are swapped.
  model::GradientRows as_stored(model::GradientRows) const;
  /// Counts rows whose norm terms the mode adds. Throws Error(internal) if their factors are known already.
  void cover(const model::GradientRows&);
  /// Output gradients of the parameters and, where the rows have them, the columns of zeros after them: products over
  /// 50,257 columns take several times as long as those over 50,304.
  kernels::AnyMatrix output_gradients(const model::GradientRows&) const;
  /// Rows of the parameters that take their gradients together. Throws Error(internal) if gradients do not have as many
  /// columns: part of a parameter would not be covered.
  std::int64_t held_by(const model::GradientRows&) const;
  /// The first row of the parameter that this rank holds.
  std::int64_t first_row(const model::GradientRows& rows) const {
    return parameters_.context.parameters.parts(rows.parameter).held.begin;
  }
  kernels::Array<double> squares(std::size_t parameter, std::int64_t first, std::int64_t count) const;
  kernels::Array<double> squares(const model::GradientRows&) const;
  kernels::Array<const float> factors(std::size_t parameter, std::int64_t first, std::int64_t count) const;

  const ClippedParameters& parameters() const { return parameters_; }
  const ClippingContext& context() const { return parameters_.context; }
  const MicroBatch& batch() const { return batch_; }
  const ClippingBuffers& buffers() const { return buffers_; }

 private:
  /// Records of the micro-batch whose norm terms of a parameter have come, of products or vectors and of lookups.
  struct Covered {
    std::int64_t by_rows = 0, by_lookup = 0;
  };
  /// Vectors whose norms go to one row, from `parameter` on, that are adjacent: of a record and in the sum.
  struct VectorRun {
    std::size_t parameter = 0;
    kernels::Array<float> sum;
  };
  void add_vector(const model::GradientRows&);
  void add_product(const model::GradientRows&);
  void add_lookup(const model::GradientRows&);
  void check_coverage(std::size_t first) const;
  kernels::Matrix<float> vectors(std::size_t parameter, std::int64_t columns) const;
  kernels::Matrix<float> over_ranks(kernels::Matrix<float> partial) const;

  const ClippedParameters parameters_;
  const ClippingBuffers buffers_;
  std::vector<std::int64_t> begin_;  // by parameter: of a vector in the elements of a record
  std::vector<VectorRun> runs_;
  MicroBatch batch_;
  std::vector<Covered> covered_;  // by parameter
  std::size_t open_ = 0;
};

}  // namespace weft::privacy

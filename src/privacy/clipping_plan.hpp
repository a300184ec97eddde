// SPDX-License-Identifier: Apache-2.0
//
// Sizes, memory and algorithms of private steps, from shapes alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/privacy/norms.hpp"
#include "model/gradient_sink.hpp"
#include "model/step_arena.hpp"
#include "privacy/privacy_settings.hpp"

namespace weft::privacy {

/// The parts of the parameters that are clipped by themselves: part[parameter], to C / sqrt(count) each. Numbered in
/// the order of the parameters; those of a part follow one another. Frozen parameters are never clipped; they have the
/// number of the next part, or of the last one.
struct ClipParts {
  ClipParts(std::span<const model::ParameterSpec>, Scheme);
  std::vector<std::size_t> part;
  std::size_t count = 1;
};

/// Shapes from which the memory of clipping follows.
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

  /// True for a parameter that is the table of a lookup and no matrix of a product.
  bool is_table(std::size_t parameter) const;
  bool is_tied(std::size_t parameter) const { return tied == parameter; }
  /// Most rows that the gradient of a record is a sum over.
  std::int64_t summed_rows() const { return examples.most_rows * sum_rows; }
};

// Specs below have the shapes on one rank: on a tensor axis, of a part of the model.

inline constexpr std::int64_t kKeptAlignment = 256;  ///< bytes, of the copy of a matrix in ClippingBuffers::kept

/// The device memory of clipping.
struct ClippingBuffers {
  ClippingBuffers() = default;
  /// settings.mode is not automatic unless settings.algorithm is naive.
  ClippingBuffers(const Settings&, std::span<const model::ParameterSpec>, const ClippingShape&, model::StepArena&);
  kernels::Array<double> bound;          ///< [2]: C; of adaptive clipping, kernels::add_clip_balance of the step
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

/// Device memory of the naive algorithm that is not in the arena.
std::int64_t own_bytes(const Settings&, std::span<const model::ParameterSpec>, const parallel::GridShape&,
                       const ClippingShape&);
/// The most that clipping gathers from a rank of the tensor axis at a time, bytes.
std::int64_t gathered_bytes(const Settings&, std::span<const model::ParameterSpec>, const ClippingShape&);

/// Text on the algorithm that forms the norms of each product: "512 x 128 width, …".
std::string to_text(const Settings&, std::span<const model::ParameterSpec>, const ClippingShape&);
/// Work of all products in a whole micro-batch. Operations are floating-point ones.
struct ProductWork {
  double direct = 0, gram = 0;  ///< operations of norms, by the algorithm that is chosen for each product
  double operations = 0;        ///< of the products of all rows: of the sums, or of the gradients of records
  double stored_elements = 0;   ///< of the gradients of all records
};
ProductWork product_work(const Settings&, std::span<const model::ParameterSpec>, const ClippingShape&);

/// Rows of a gradient as products form it where its rows of output gradients have columns of zeros for the rows of
/// zeros after the parameter (ParameterSpec::row_multiple). `out`: those of the parameters themselves.
std::int64_t padded_rows(const model::ParameterSpec&, std::int64_t out);
/// Method that forms the norms of a product.
kernels::NormMethod method_of(const Settings&, std::int64_t in, std::int64_t out, const ClippingShape&);

}  // namespace weft::privacy

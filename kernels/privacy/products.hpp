// SPDX-License-Identifier: Apache-2.0
//
// Forms the per-example gradients G_bᵀ X_b in fp32, some rows of some examples at a time, in a workspace of bounded
// size: the dense library's path of norms, clipped sums and stored gradients.
#pragma once

#include <algorithm>

#include "kernels/gemm/gemm.hpp"
#include "kernels/privacy/example_sums.hpp"
#include "kernels/privacy/examples.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {

/// Bytes of gradients that are formed at a time: on the host they stay in the caches, on a GPU they fill it.
constexpr std::int64_t kFormedBytes = kCudaBuild ? std::int64_t{128} << 20 : std::int64_t{4} << 20;

struct FormedProducts {
  std::int64_t outputs = 0;   ///< rows of a gradient that are formed at a time
  std::int64_t examples = 0;  ///< gradients that are formed at a time
  Array<float> values;        ///< [examples, outputs * in]
  Array<double> parts;        ///< of add_squares
  Array<std::byte> library;
  std::int64_t bytes = 0;
};

/// tile: `outputs`, 0: automatic.
FormedProducts formed_products_layout(std::byte* data, Scalar x, Scalar g, std::int64_t in, std::int64_t out,
                                      const ExampleSizes&, std::int64_t tile);

inline ExampleSizes sizes_of(const Examples& examples) {
  const std::int64_t rows = examples.count() == 0 ? 0 : examples.offsets.back() - examples.offsets.front();
  return {examples.count(), examples.most_rows(), rows};
}

/// Throws Error(internal) unless there are as many device offsets and values as examples, and enough workspace.
void require_examples(const Examples&, std::int64_t values, std::int64_t needed, Array<std::byte> workspace,
                      const char* what);

/// Calls body(first, count) for consecutive examples of equally many rows, more than `least`, at most `most` at a time.
template <class Body>
void for_equal_examples(const Examples& examples, std::int64_t least, std::int64_t most, const Body& body) {
  for (std::int64_t first = 0, count; first < examples.count(); first += count) {
    const std::int64_t rows = examples.rows_of(first);
    for (count = 1; first + count < examples.count() && examples.rows_of(first + count) == rows && count < most;)
      ++count;
    if (rows > least) body(first, count);
  }
}

/// Calls body(first example, count, first output, Matrix<const float> [count, outputs * in]) for every part that is
/// formed: examples of more than `least` rows in ascending order, of each its outputs in ascending order.
template <class Body>
void for_formed_products(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                         std::int64_t least, const FormedProducts& formed, const Body& body) {
  Execution exact = execution;
  exact.tf32 = false;
  for_equal_examples(examples, least, formed.examples, [&](std::int64_t first, std::int64_t count) {
    const std::int64_t row = examples.offsets[first], rows = examples.rows_of(first);
    for (std::int64_t output = 0; output < g.columns; output += formed.outputs) {
      const std::int64_t outputs = std::min(formed.outputs, g.columns - output), size = outputs * x.columns;
      gemm_batched(exact, 1, g.rows_from(row, rows).columns_from(output, outputs), Form::transposed,
                   x.rows_from(row, rows), Form::plain, 0,
                   {formed.values.data, Scalar::fp32, outputs, x.columns, x.columns},
                   {count, rows * g.stride, rows * x.stride, size}, formed.library);
      body(first, count, output, Matrix<const float>{formed.values.data, count, size, size});
    }
  });
}

}  // namespace weft::kernels

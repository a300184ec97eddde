// SPDX-License-Identifier: Apache-2.0
//
// Records one by one, the gradient of each in memory; the factors are formed on the host. The oracle of the other
// modes.
#include <algorithm>
#include <array>
#include <utility>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/reduce/reduce.hpp"
#include "privacy/modes.hpp"

namespace weft::privacy {
namespace {

using kernels::Array;
using kernels::Matrix;

class Naive final : public Clipping {
 public:
  Naive(const ClippingContext& context, ClippingBuffers&& buffers)
      : parameters_(context),
        buffers_(std::move(buffers)),
        one_(context.parameters, context.execution, context.shape.examples.rows * context.shape.sum_rows) {}

  void add(const MicroBatch& batch, Passes& passes) override {
    const ClippingContext& context = parameters_.context;
    const std::size_t size = parameters_.specs.size();
    std::vector<double> parts(parameters_.parts.count);
    std::array<double, 2> bound = {};
    device::copy(context.execution, bound.data(), buffers_.bound.data, sizeof bound, device::Direction::to_host);
    kernels::fence(context.execution);
    for (std::int64_t e = 0; e < batch.examples.count(); ++e) {
      one_.clear();
      passes.pass({e, e + 1}, one_);
      const std::vector<double> squares = squares_of_one();
      context.phase("clipped sums");
      std::fill(parts.begin(), parts.end(), 0.0);
      for (std::size_t i = 0; i < size; ++i) parts[parameters_.parts.part[i]] += squares[i];
      for (std::size_t i = 0; i < size; ++i) {
        const float factor = factor_of(parts[parameters_.parts.part[i]], bound[0]);
        if (factor == 0 || parameters_.specs[i].frozen) continue;  // 0 also if the gradient is not finite
        // Rank 0 has added the partial gradients of all ranks.
        if (parameters_.is_partial(i) && context.tensor->rank() > 0) continue;
        const Matrix<float> of_one = gradient(one_, i), sum = gradient(context.sum, i);
        kernels::scale_rows(context.execution, view(of_one), factor);
        kernels::add_rows(context.execution, view(sum), view(of_one), view(sum));
      }
      bound[1] += factor_of(parts[0], bound[0]) == 1 ? 1 : -1;
    }
    if (!context.settings.adapts_clip()) return;
    device::copy(context.execution, buffers_.bound.data, bound.data(), sizeof bound, device::Direction::to_device);
    kernels::fence(context.execution);
  }

 private:
  float factor_of(double square, double bound) const {
    return kernels::clip_factor(square, bound * parameters_.part_share(), parameters_.context.settings.clip_function,
                                parameters_.context.shape.summed_rows());
  }

  Matrix<float> gradient(const model::AccumulatingSink& sink, std::size_t parameter) const {
    if (parameters_.specs[parameter].is_matrix()) return sink.held(parameter);
    const Array<float> vector = sink.vector(parameter);
    return {vector.data, 1, vector.size, vector.size};
  }

  /// By parameter, the square of the norm of the gradient of one record; 0 for those that another rank counts.
  std::vector<double> squares_of_one() const {
    const ClippingContext& context = parameters_.context;
    const kernels::Execution& execution = context.execution;
    const auto size = static_cast<std::int64_t>(parameters_.specs.size());
    std::vector<double> squares(parameters_.specs.size());
    double* const totals = buffers_.totals.data;
    const Array<double> workspace{totals + size, buffers_.totals.size - size};
    if (const Array<float> partial = one_.partial_vectors(); context.tensor != nullptr && partial.size > 0)
      kernels::sum_rows(
          execution,
          {context.tensor->gather(partial, "gradients").data, context.tensor->size(), partial.size, partial.size},
          partial);
    for (std::size_t i = 0; i < squares.size(); ++i) {
      if (parameters_.specs[i].frozen) {
        device::zero(execution, totals + i, sizeof(double));
        continue;
      }
      const Matrix<float> of_one = gradient(one_, i);
      const Array<double> rows{buffers_.squares.data, of_one.rows};
      device::zero(execution, rows);
      kernels::add_row_norms(execution, of_one, rows);
      kernels::total(execution, rows, workspace, totals + i);
      if (parameters_.row_of(i) == parameters_.parts.count) device::zero(execution, totals + i, sizeof(double));
    }
    parameters_.add_over_ranks({totals, size});
    device::copy(execution, squares.data(), totals, 8 * size, device::Direction::to_host);
    kernels::fence(execution);
    return squares;
  }

  const ClippedParameters parameters_;
  const ClippingBuffers buffers_;
  model::AccumulatingSink one_;  // the gradient of one record
};

}  // namespace

std::unique_ptr<Clipping> make_naive(const ClippingContext& context, ClippingBuffers&& buffers) {
  return std::make_unique<Naive>(context, std::move(buffers));
}

}  // namespace weft::privacy

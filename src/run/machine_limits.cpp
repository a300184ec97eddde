// SPDX-License-Identifier: Apache-2.0
#include "run/machine_limits.hpp"

#include <span>

#include "base/clock.hpp"
#include "device/memory.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/limits/limits.hpp"

namespace weft::run {
namespace {

using kernels::Scalar;

/// Seconds of the shortest of several tries: a limit is the best that the machine can do.
template <class Action>
double shortest(const kernels::Execution& execution, int tries, Action&& action) {
  double best = 0;
  for (int i = 0; i < tries; ++i) {
    const Clock::time_point begin = Clock::now();
    action();
    kernels::fence(execution);
    const double seconds = seconds_since(begin);
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;  // the first try touches the memory
  }
  return best;
}

double mean_over_ranks(double value, const parallel::Communicator& world) {
  world.sum(std::span<double>(&value, 1));
  return value / world.size();
}

}  // namespace

double measure_copy(const kernels::Execution& execution, const parallel::Communicator& world) {
  const std::int64_t bytes = std::int64_t{256} << 20;  // far larger than any cache
  const device::Buffer<std::byte> from(bytes), to(bytes);
  device::zero(execution, from.data(), bytes);
  world.barrier();
  const double seconds = shortest(execution, 8, [&] { kernels::copy_memory(execution, from.array(), to.array()); });
  return mean_over_ranks(2e-9 * static_cast<double>(bytes) / seconds, world);
}

double measure_product(const kernels::Execution& execution, std::int64_t n_tokens, std::int64_t n_features,
                       std::int64_t d_model, const parallel::Communicator& world) {
  const std::int64_t d = d_model;
  const bool narrow = execution.backend == kernels::Backend::cuda;  // precision of the step
  const Scalar type = narrow ? Scalar::bf16 : Scalar::fp32;
  const std::int64_t element = kernels::bytes_of(type);
  const device::Buffer<std::byte> x(n_tokens * d * element), weight(n_features * d * element),
      product(n_tokens * n_features * element);
  const device::Buffer<std::byte> workspace(kernels::gemm_workspace(type, type, type, n_tokens, n_features, d));
  device::zero(execution, x.data(), x.bytes());
  device::zero(execution, weight.data(), weight.bytes());
  world.barrier();
  const double seconds = shortest(execution, 8, [&] {
    kernels::gemm(execution, 1.0f, {x.data(), type, n_tokens, d, d}, kernels::Form::plain,
                  {weight.data(), type, n_features, d, d}, kernels::Form::transposed, 0.0f,
                  {product.data(), type, n_tokens, n_features, n_features}, workspace.array());
  });
  return mean_over_ranks(
      2e-9 * static_cast<double>(n_tokens) * static_cast<double>(n_features) * static_cast<double>(d) / seconds, world);
}

}  // namespace weft::run

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/drivers.hpp"

#include "transcoder/selection/device_selector.hpp"
#include "transcoder/selection/host_selector.hpp"

namespace weft::transcoder {

void take_driver_buffers(const SelectionSpec& spec, SelectionBuffers& buffers, model::StepArena& arena) {
  if constexpr (kernels::kCudaBuild)
    if (spec.backend == kernels::Backend::cuda) return take_device_selector_buffers(spec, buffers, arena);
  take_host_selector_buffers(spec, buffers, arena);
}

SelectionBuffers::SelectionBuffers(const SelectionSpec& spec, model::StepArena& arena) : sizes(spec) {
  const std::int64_t n_keys = spec.n_layers * sizes.max_features;
  row_offsets = arena.take<std::int64_t>(sizes.max_tokens + 1);
  key = arena.take<std::uint32_t>(sizes.capacity);
  value = arena.take<float>(sizes.capacity);
  hit_offsets = arena.take<std::int64_t>(n_keys + 1);
  hit_token = arena.take<std::uint32_t>(sizes.capacity);
  hit_position = arena.take<std::uint32_t>(sizes.capacity);
  transpose_workspace = arena.take<std::byte>(kernels::transpose_workspace(spec.backend, n_keys, sizes.capacity));
  n_entries = arena.take_host<std::int64_t>(1);
  if (spec.factory != nullptr)
    spec.factory->take(spec, *this, arena);
  else
    take_driver_buffers(spec, *this, arena);
}

std::unique_ptr<Selector> make_driver(const SelectionSpec& spec, const SelectionBuffers& buffers,
                                      const parallel::Grid& grid, const kernels::Execution& execution,
                                      const SumDecorator& decorate) {
  if constexpr (kernels::kCudaBuild)
    if (execution.backend == kernels::Backend::cuda)
      return make_device_selector(spec, buffers, grid, execution, decorate);
  return make_host_selector(spec, buffers, grid, execution, decorate);
}

std::unique_ptr<Selector> make_selector(const SelectionSpec& spec, const SelectionBuffers& buffers,
                                        const parallel::Grid& grid, const kernels::Execution& execution) {
  return spec.factory != nullptr ? spec.factory->make(spec, buffers, grid, execution)
                                 : make_driver(spec, buffers, grid, execution);
}

}  // namespace weft::transcoder

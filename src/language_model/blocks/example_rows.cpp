// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/example_rows.hpp"

#include <algorithm>
#include <span>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::language_model {

ExampleRows::Buffers::Buffers(const TransformerSettings& settings, model::StepArena& arena) {
  if (!settings.gradients || !settings.examples) return;
  arena.purpose("backward pass");
  offsets = arena.take<std::int64_t>(kNumbers * (settings.rows / settings.length + 1));
}

ExampleRows::ExampleRows(const TransformerSettings& settings, const kernels::Execution& execution,
                         const Buffers& buffers)
    : wanted_(settings.examples),
      numbers_{settings.length, settings.length * settings.architecture.model.heads,
               settings.length * settings.architecture.model.kv_heads, norm_blocks(settings, 0).of_length()},
      buffers_(buffers) {
  if (!wanted_) return;
  for (const std::int64_t rows : numbers_)
    for (std::int64_t e = 0; e < buffers_.offsets.size / kNumbers; ++e) offsets_.push_back(e * rows);
  device::copy(execution, buffers_.offsets.data, offsets_.data(), 8 * buffers_.offsets.size,
               device::Direction::to_device);
  kernels::fence(execution);
}

kernels::Examples ExampleRows::of(std::int64_t rows, std::int64_t of_example) const {
  if (!wanted_) return {};
  const std::int64_t place = std::find(numbers_.begin(), numbers_.end(), of_example) - numbers_.begin(),
                     begin = place * (buffers_.offsets.size / kNumbers), size = rows / of_example + 1;
  return {.offsets = std::span(offsets_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
          .device_offsets = {buffers_.offsets.data + begin, size}};
}

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/example_rows.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
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
      buffers_(buffers),
      execution_(execution) {
  if (buffers_.offsets.size == 0) return;
  offsets_.resize(static_cast<std::size_t>(buffers_.offsets.size));
  place(std::vector<std::int64_t>(static_cast<std::size_t>(buffers_.offsets.size / kNumbers - 1), 1));
  kernels::fence(execution);
}

/// States where the examples begin. Those after the last one have no rows.
void ExampleRows::place(std::span<const std::int64_t> sequences) {
  auto offset = offsets_.begin();
  for (const std::int64_t rows : numbers_) {
    const auto end = offset + std::ssize(offsets_) / kNumbers;
    *offset = 0;
    for (const std::int64_t count : sequences) {
      const std::int64_t next = *offset + count * rows;
      *++offset = next;
    }
    offset = std::fill_n(offset + 1, end - offset - 1, std::numeric_limits<std::int64_t>::max());
  }
  device::copy(execution_, buffers_.offsets.data, offsets_.data(), 8 * buffers_.offsets.size,
               device::Direction::to_device);
}

void ExampleRows::join(std::span<const std::int64_t> sequences) {
  if (std::ssize(sequences) >= buffers_.offsets.size / kNumbers)
    throw error(ExitCode::internal, "{} examples in a micro-batch of {} sequences", sequences.size(),
                buffers_.offsets.size / kNumbers - 1);
  place(sequences);
  kernels::fence(execution_);  // the copy is over when the host's offsets change again
}

kernels::Examples ExampleRows::of(std::int64_t rows, std::int64_t of_example) const {
  if (!wanted_) return {};
  const std::int64_t place = std::find(numbers_.begin(), numbers_.end(), of_example) - numbers_.begin(),
                     most = buffers_.offsets.size / kNumbers, begin = place * most;
  const auto first = offsets_.begin() + begin;
  const std::int64_t size = std::upper_bound(first, first + most, rows) - first;
  return {.offsets = std::span(offsets_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
          .device_offsets = {buffers_.offsets.data + begin, size}};
}

}  // namespace weft::language_model

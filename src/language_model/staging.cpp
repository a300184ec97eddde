// SPDX-License-Identifier: Apache-2.0
#include "language_model/staging.hpp"

#include "base/error.hpp"

namespace weft::language_model {

Staging::Buffers::Buffers(std::int64_t rows, bool document_mask, training::StepArena& arena) {
  arena.purpose("tokens");
  const std::int64_t masked = document_mask ? rows : 0;
  device = {arena.take<std::uint32_t>(rows), arena.take<std::int32_t>(rows), arena.take<std::int32_t>(rows),
            arena.take<std::int32_t>(masked), arena.take<float>(1)};
  losses = arena.take<float>(rows);
  for (Rows& slot : host)
    slot = {arena.take_host<std::uint32_t>(rows), arena.take_host<std::int32_t>(rows),
            arena.take_host<std::int32_t>(rows), arena.take_host<std::int32_t>(masked), arena.take_host<float>(1)};
}

Staging::Staging(std::int64_t rows, bool document_mask, const kernels::Execution& execution, training::StepArena& arena)
    : execution_(execution), buffers_(rows, document_mask, arena) {}

dataset::TokenBatch Staging::next(std::int64_t sequences, std::int64_t length) {
  slot_ = (slot_ + 1) % buffers_.host.size();
  const Buffers::Rows& host = buffers_.host[slot_];
  if (sequences * length > host.ids.size)
    throw error(ExitCode::internal, "{} sequences of {} tokens do not fit the staging memory of {} tokens", sequences,
                length, host.ids.size);
  const auto rows = static_cast<std::size_t>(sequences * length);
  return {.sequences = sequences,
          .length = length,
          .ids = {host.ids.data, rows},
          .targets = {host.targets.data, rows},
          .positions = {host.positions.data, rows},
          .first_key = {host.first_key.data, host.first_key.size > 0 ? rows : 0}};
}

void Staging::send(const dataset::TokenBatch& batch) {
  const auto copy = [&]<class T>(kernels::Array<T> to, const T* from, std::size_t count) {
    device::copy(execution_, to.data, from, static_cast<std::int64_t>(count * sizeof(T)), device::Direction::to_device);
  };
  const Buffers::Rows &here = buffers_.device, &host = buffers_.host[slot_];
  copy(here.ids, batch.ids.data(), batch.ids.size());
  copy(here.targets, batch.targets.data(), batch.targets.size());
  copy(here.positions, batch.positions.data(), batch.positions.size());
  copy(here.first_key, batch.first_key.data(), batch.first_key.size());
  host.scale[0] = batch.counted > 0 ? static_cast<float>(1.0 / static_cast<double>(batch.counted)) : 0.0f;
  copy(here.scale, host.scale.data, 1);
}

Tokens Staging::tokens(std::int64_t first, std::int64_t sequences, std::int64_t length) const {
  const std::int64_t begin = first * length, rows = sequences * length;
  const Buffers::Rows& device = buffers_.device;
  Tokens tokens{.sequences = sequences,
                .length = length,
                .ids = {device.ids.data + begin, rows},
                .targets = {device.targets.data + begin, rows},
                .positions = {device.positions.data + begin, rows},
                .first_key = {},
                .first_row = begin};
  if (device.first_key.size > 0) tokens.first_key = {device.first_key.data + begin, rows};
  return tokens;
}

}  // namespace weft::language_model

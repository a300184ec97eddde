// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/staging.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/language/head/cross_entropy.hpp"

namespace weft::language_model {

Staging::Buffers::Buffers(std::int64_t rows, bool document_mask, bool weights, model::StepArena& arena) {
  arena.purpose("tokens");
  const std::int64_t masked = document_mask ? rows : 0, weighted = weights ? rows : 0;
  device = {arena.take<std::uint32_t>(rows),  arena.take<std::int32_t>(rows), arena.take<std::int32_t>(rows),
            arena.take<std::int32_t>(masked), arena.take<float>(1),           arena.take<float>(weighted)};
  losses = arena.take<float>(rows);
  for (Rows& slot : host)
    slot = {
        arena.take_host<std::uint32_t>(rows),  arena.take_host<std::int32_t>(rows), arena.take_host<std::int32_t>(rows),
        arena.take_host<std::int32_t>(masked), arena.take_host<float>(1),           arena.take_host<float>(weighted)};
}

Staging::Staging(std::int64_t rows, bool document_mask, const kernels::Execution& execution, model::StepArena& arena,
                 bool weights)
    : execution_(execution), buffers_(rows, document_mask, weights, arena) {}

dataset::TokenBatch Staging::next(std::int64_t sequences, std::int64_t length, std::int64_t first_row) {
  first_row_ = first_row;
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

void Staging::send(const dataset::TokenBatch& batch, std::int64_t counted) {
  const auto copy = [&]<class T>(kernels::Array<T> to, const T* from, std::size_t count) {
    device::copy(execution_, to.data, from, static_cast<std::int64_t>(count * sizeof(T)), device::Direction::to_device);
  };
  const Buffers::Rows &here = buffers_.device, &host = buffers_.host[slot_];
  copy(here.ids, batch.ids.data(), batch.ids.size());
  copy(here.targets, batch.targets.data(), batch.targets.size());
  copy(here.positions, batch.positions.data(), batch.positions.size());
  copy(here.first_key, batch.first_key.data(), batch.first_key.size());
  host.scale[0] = counted > 0 ? static_cast<float>(1.0 / static_cast<double>(counted)) : 0.0f;
  copy(here.scale, host.scale.data, 1);
  weighted_ = false;
}

void Staging::send_examples(const dataset::TokenBatch& batch, std::span<const std::int64_t> sequences) {
  send(batch, 1);
  const Buffers::Rows& host = buffers_.host[slot_];
  std::int64_t begin = 0;
  for (const std::int64_t count : sequences) {
    const std::int64_t rows = count * batch.length;
    const auto targets = batch.targets.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(rows));
    const std::int64_t counted = rows - std::count(targets.begin(), targets.end(), kernels::kIgnored);
    std::fill_n(host.weights.data + begin, rows,
                counted > 0 ? static_cast<float>(1.0 / static_cast<double>(counted)) : 0.0f);
    begin += rows;
  }
  device::copy(execution_, buffers_.device.weights.data, host.weights.data, 4 * batch.rows(),
               device::Direction::to_device);
  weighted_ = true;
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
                .first_row = first_row_ + begin,
                .scale = scale()};
  if (device.first_key.size > 0) tokens.first_key = {device.first_key.data + begin, rows};
  if (weighted_) tokens.weights = {device.weights.data + begin, rows};
  return tokens;
}

}  // namespace weft::language_model

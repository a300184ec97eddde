// SPDX-License-Identifier: Apache-2.0
#include "model/state_stream.hpp"

#include <algorithm>

#include "kernels/optimize/adam.hpp"
#include "kernels/workspace.hpp"

namespace weft::model {

using kernels::ParameterRows;
using kernels::StorageType;

namespace {

/// The arrays of the state: the low half of fp32 weights, two moments, their scales. Each begins at an aligned address.
constexpr std::int64_t kArrays = 5;
constexpr std::int64_t kAlignmentBytes = kArrays * kernels::Workspace::kAlignment;

/// each(pointer, bytes of a row) for the arrays that this storage type has.
template <class Each>
void for_each_array(ParameterRows& p, const Each& each) {
  const auto visit = [&](auto*& data, std::int64_t row_bytes) {
    if (data == nullptr) return;
    void* at = data;
    each(at, row_bytes);
    data = static_cast<std::remove_reference_t<decltype(data)>>(at);
  };
  const std::int64_t moment = p.storage == StorageType::fp32 ? 4 : p.storage == StorageType::bf16 ? 2 : 1;
  visit(p.weight_rest, 2 * p.columns);
  visit(p.first_moment, moment * p.columns);
  visit(p.second_moment, moment * p.columns);
  visit(p.first_scale, 4 * p.blocks_per_row());
  visit(p.second_scale, 4 * p.blocks_per_row());
}

/// Rows [begin, begin + count) of a matrix.
ParameterRows rows_of(const ParameterRows& all, std::int64_t begin, std::int64_t count) {
  ParameterRows part = all;
  const std::int64_t weight = all.storage == StorageType::fp32 && all.weight_rest == nullptr ? 4 : 2;
  part.weight = static_cast<std::byte*>(all.weight) + begin * all.columns * weight;
  part.rows = count;
  part.first_row += begin;
  for_each_array(
      part, [&](void*& data, std::int64_t row_bytes) { data = static_cast<std::byte*>(data) + begin * row_bytes; });
  return part;
}

}  // namespace

StateStream::Buffers::Buffers(std::span<const ParameterSpec> specs, StorageType storage, StepArena& arena,
                              std::int64_t most) {
  std::int64_t largest = 0, row = 0;
  for (const ParameterSpec& spec : specs) {
    if (spec.frozen) continue;
    std::int64_t of_row = 0;
    for (const Plane& plane : planes_of(spec, storage, arena.backend(), Moments::on_host))
      if (is_on_host(spec, plane, Moments::on_host)) of_row += plane.columns * kernels::bytes_of(plane.type);
    row = std::max(row, of_row);
    largest = std::max(largest, of_row * spec.rows());
  }
  const std::int64_t bytes = std::max(std::min(most, largest), row) + kAlignmentBytes;
  for (kernels::Array<std::byte>& block : blocks) block = arena.take<std::byte>(bytes);
}

StateStream::StateStream(const kernels::Execution& execution, const Buffers& buffers)
    : execution_(execution), buffers_(buffers), in_(execution), out_(execution) {}

void StateStream::begin() {
  blocks_ = 0;
  begun_.record(execution_);
  begun_.hold_back(in_.execution());
}

void StateStream::update(const ParameterRows& parameters, kernels::Matrix<const float> gradient,
                         const kernels::AdamStep* step) {
  std::int64_t row_bytes = 0;
  ParameterRows all = parameters;
  for_each_array(all, [&](void*&, std::int64_t bytes) { row_bytes += bytes; });
  const std::int64_t most = std::max<std::int64_t>(1, (buffers_.blocks[0].size - kAlignmentBytes) / row_bytes);
  for (std::int64_t begin = 0; begin < all.rows; begin += most, ++blocks_) {
    const std::int64_t count = std::min(most, all.rows - begin);
    const std::int64_t at = blocks_ % kBuffers;
    if (blocks_ >= kBuffers) returned_[at].hold_back(in_.execution());
    ParameterRows on_host = rows_of(all, begin, count), on_device = on_host;
    kernels::Workspace buffer(buffers_.blocks[at].data);
    for_each_array(on_device, [&](void*& data, std::int64_t bytes) {
      std::byte* const to = buffer.take<std::byte>(count * bytes).data;
      device::copy(in_.execution(), to, data, count * bytes, device::Direction::to_device);
      data = to;
    });
    arrived_[at].record(in_.execution());
    arrived_[at].hold_back(execution_);
    kernels::adam_rows(execution_, on_device, 0, {gradient.row(begin), count, gradient.columns, gradient.stride}, step);
    updated_[at].record(execution_);
    updated_[at].hold_back(out_.execution());
    kernels::Workspace filled(buffers_.blocks[at].data);
    for_each_array(on_host, [&](void*& data, std::int64_t bytes) {
      device::copy(out_.execution(), data, filled.take<std::byte>(count * bytes).data, count * bytes,
                   device::Direction::to_host);
    });
    returned_[at].record(out_.execution());
  }
}

void StateStream::end() {
  if (blocks_ == 0) return;
  ended_.record(out_.execution());
  ended_.hold_back(execution_);
}

}  // namespace weft::model

// SPDX-License-Identifier: Apache-2.0
#include "model/step_arena.hpp"

#include <algorithm>

#include "parallel/device_communicator.hpp"

namespace weft::model {

StepArena& StepArena::purpose(std::string_view name) {
  const auto found = std::find_if(bytes_.begin(), bytes_.end(), [&](const Bytes& b) { return b.purpose == name; });
  present_ = static_cast<std::size_t>(found - bytes_.begin());
  if (found == bytes_.end()) bytes_.push_back({std::string(name)});
  return *this;
}

void StepArena::count(Where where, std::int64_t bytes) {
  if (bytes_.empty()) purpose("step");
  (where == Where::device ? bytes_[present_].device : bytes_[present_].host) += bytes;
}

void StepArena::communicator(std::int64_t n_ranks, std::int64_t largest_message) {
  const parallel::DeviceCommunicator::Bytes bytes = parallel::DeviceCommunicator::bytes(n_ranks, largest_message);
  count(Where::device, bytes.device());
  count(Where::host, bytes.staging);
}

void* StepArena::take_bytes(Where where, std::int64_t bytes) {
  count(where, bytes);
  return grid_ == nullptr ? nullptr : memory_.emplace_back(bytes, where).data();
}

parallel::ExchangeBuffer StepArena::exchange(std::string_view axis, std::int64_t bytes,
                                             const parallel::ExchangeStrategy& strategy) {
  count(Where::device, bytes);
  return grid_ == nullptr ? parallel::ExchangeBuffer() : parallel::ExchangeBuffer(grid_->axis(axis), bytes, strategy);
}

bool StepArena::is_direct(std::string_view axis, const parallel::ExchangeStrategy& strategy) const {
  return grid_ != nullptr && strategy.is_direct(grid_->axis(axis));
}

std::int64_t StepArena::device_bytes() const {
  std::int64_t sum = 0;
  for (const Bytes& b : bytes_) sum += b.device;
  return sum;
}

std::int64_t StepArena::host_bytes() const {
  std::int64_t sum = 0;
  for (const Bytes& b : bytes_) sum += b.host;
  return sum;
}

}  // namespace weft::model

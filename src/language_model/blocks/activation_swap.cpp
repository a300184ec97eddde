// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/activation_swap.hpp"

namespace weft::language_model {

void ActivationSwap::Buffers::add_bytes(std::size_t set, const void* data, std::int64_t bytes) {
  if (bytes > 0) sets[set].push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes});
}

std::int64_t ActivationSwap::Buffers::bytes() const {
  std::int64_t sum = 0;
  for (const kernels::Array<std::byte>& array : sets[0]) sum += array.size;
  return sum;
}

void ActivationSwap::Buffers::take_host(std::size_t blocks, model::StepArena& arena) {
  arena.purpose("swapped activations");
  while (host.size() + kResidentBlocks < blocks) host.push_back(arena.take_host<std::byte>(bytes()));
}

ActivationSwap::ActivationSwap(const kernels::Execution& execution, const Buffers& buffers)
    : execution_(execution), buffers_(buffers), out_(execution), in_(execution) {}

/// Calls each(array of the block, its place in host memory).
template <class Copy>
void ActivationSwap::copy(std::size_t block, const Copy& each) const {
  std::byte* at = buffers_.host[block].data;
  for (const kernels::Array<std::byte>& array : buffers_.sets[block % kResidentBlocks]) {
    each(array, at);
    at += array.size;
  }
}

void ActivationSwap::before_forward(std::size_t block) {
  // The set is that of the block two before this one.
  if (block >= kResidentBlocks) stored_[block % kResidentBlocks].hold_back(execution_);
}

void ActivationSwap::after_forward(std::size_t block) {
  if (!is_swapped(block)) return;
  computed_.record(execution_);
  computed_.hold_back(out_.execution());
  copy(block, [&](const kernels::Array<std::byte>& array, std::byte* host) {
    device::copy(out_.execution(), host, array.data, array.size, device::Direction::to_host);
  });
  stored_[block % kResidentBlocks].record(out_.execution());
}

void ActivationSwap::before_backward(std::size_t block) {
  if (is_swapped(block)) fetched_[block % kResidentBlocks].hold_back(execution_);
}

void ActivationSwap::after_backward(std::size_t block) {
  if (block < kResidentBlocks) return;
  const std::size_t next = block - kResidentBlocks;
  computed_.record(execution_);
  computed_.hold_back(in_.execution());
  copy(next, [&](const kernels::Array<std::byte>& array, std::byte* host) {
    device::copy(in_.execution(), array.data, host, array.size, device::Direction::to_device);
  });
  fetched_[next % kResidentBlocks].record(in_.execution());
}

}  // namespace weft::language_model

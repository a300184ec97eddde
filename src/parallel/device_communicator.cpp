// SPDX-License-Identifier: Apache-2.0
#include "parallel/device_communicator.hpp"

#include <chrono>
#include <numeric>

#include "kernels/runtime.hpp"

namespace weft::parallel {
namespace {

#ifdef WEFT_ENABLE_CUDA
constexpr bool kStaged = true;
#else
constexpr bool kStaged = false;
#endif

std::int64_t total(std::span<const std::int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

/// Adds what a call took to the traffic of its axis.
class Measured {
 public:
  Measured(Traffic& traffic, std::int64_t bytes_sent) : traffic_(traffic), begin_(std::chrono::steady_clock::now()) {
    traffic_.bytes_sent += bytes_sent;
    ++traffic_.calls;
  }
  ~Measured() { traffic_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  Traffic& traffic_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace

DeviceCommunicator::DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution,
                                       std::int64_t largest_message)
    : ranks_(&ranks), execution_(execution) {
  if (kStaged && ranks.size() > 1) {
    staged_send_ = device::HostBuffer<std::byte>(largest_message);
    staged_receive_ = device::HostBuffer<std::byte>(largest_message);
  }
}

void DeviceCommunicator::all_gather(void* data, std::span<const std::int64_t> bytes) {
  if (size() == 1) return;
  const std::int64_t begin = total(bytes.first(static_cast<std::size_t>(rank())));
  const std::int64_t own = bytes[static_cast<std::size_t>(rank())];
  const Measured measured(traffic_, own * (size() - 1));
  if (!kStaged) {
    ranks_->all_gather_uneven(static_cast<std::byte*>(data) + begin, data, bytes);
    return;
  }
  std::byte* host = staged_receive_.data();
  device::copy(execution_, host + begin, static_cast<std::byte*>(data) + begin, own, device::Direction::to_host);
  kernels::fence(execution_);
  ranks_->all_gather_uneven(host + begin, host, bytes);
  device::copy(execution_, data, host, total(bytes), device::Direction::to_device);
}

void DeviceCommunicator::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                                    std::span<const std::int64_t> receive_bytes) {
  const Measured measured(traffic_, total(send_bytes) - send_bytes[static_cast<std::size_t>(rank())]);
  if (!kStaged) {
    ranks_->all_to_all(send, send_bytes, receive, receive_bytes);
    return;
  }
  device::copy(execution_, staged_send_.data(), send, total(send_bytes), device::Direction::to_host);
  kernels::fence(execution_);
  ranks_->all_to_all(staged_send_.data(), send_bytes, staged_receive_.data(), receive_bytes);
  device::copy(execution_, receive, staged_receive_.data(), total(receive_bytes), device::Direction::to_device);
}

}  // namespace weft::parallel

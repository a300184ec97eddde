// SPDX-License-Identifier: Apache-2.0
#include "parallel/device_communicator.hpp"

#include <chrono>
#include <numeric>
#include <vector>

#include "base/clock.hpp"
#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/trace.hpp"
#include "device/ranges.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/reduce/reduce.hpp"
#include "parallel/gpu_groups.hpp"
#include "parallel/nccl.hpp"

namespace weft::parallel {
namespace {

using device::Direction;

/// Largest bounce buffer: larger messages are as fast through NCCL.
constexpr std::int64_t kLargestBounce = 64 << 20;

std::int64_t total(std::span<const std::int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

}  // namespace

/// Counts and times one call under its name.
class DeviceCommunicator::Measured {
 public:
  Measured(DeviceCommunicator& axis, const char* name, std::int64_t bytes_sent)
      : axis_(axis), name_(name), range_(name, &axis.execution_), traffic_(axis.exchanges_.of(name)) {
    traffic_.bytes_sent += bytes_sent;
    ++traffic_.calls;
    // Staged exchanges wait for the GPU: that time is not part of the exchange.
    if (axis.staged_) kernels::fence(axis.execution_);
    if (axis.observer_ != nullptr) axis.observer_->before(axis.execution_, *axis.ranks_);
    if (axis.idle_ != nullptr) axis.idle_->begin(axis.execution_);
    begin_ = Clock::now();
  }
  ~Measured() {
    if (axis_.idle_ != nullptr) axis_.idle_->end(axis_.execution_);
    if (axis_.observer_ != nullptr) axis_.observer_->after(axis_.execution_);
    if (!axis_.is_timed()) return;
    const auto end = Clock::now();
    traffic_.seconds += std::chrono::duration<double>(end - begin_).count();
    if (trace::on()) trace::record(trace::Row::exchanges, name_, begin_, end);
  }

 private:
  DeviceCommunicator& axis_;
  const char* const name_;
  const device::Range range_;
  Traffic& traffic_;
  Clock::time_point begin_;
};

DeviceCommunicator::Bytes DeviceCommunicator::bytes(std::int64_t n_ranks, std::int64_t largest_message) {
  if (!kernels::kCudaBuild || n_ranks == 1) return {};
  return {.bounce = largest_message <= kLargestBounce ? largest_message : 0,
          .gathered = n_ranks * kMostValues * static_cast<std::int64_t>(sizeof(double)),
          .staging = 2 * largest_message};
}

DeviceCommunicator::DeviceCommunicator(const Communicator& ranks, const kernels::Execution& execution,
                                       std::int64_t largest_message, ExchangeStrategy strategy)
    : ranks_(&ranks),
      execution_(execution),
      gpus_(gpus_of(ranks)),
      peers_(strategy.is_direct(ranks) ? peers_of(ranks) : nullptr),
      channel_(peers_ != nullptr ? std::make_unique<Peers::Channel>(*peers_) : nullptr),
      staged_(kernels::kCudaBuild && ranks.size() > 1 && gpus_ == nullptr),
      observer_(strategy.observer),
      largest_message_(largest_message) {
  const Bytes sizes = bytes(ranks.size(), largest_message);
  if (staged_) {
    staged_send_ = device::HostBuffer<std::byte>(sizes.staging / 2);
    staged_receive_ = device::HostBuffer<std::byte>(sizes.staging / 2);
  }
  if (is_direct()) bounce_ = {ranks, sizes.bounce, strategy};
  if (gpus_ != nullptr && !is_direct())
    gathered_ = device::Buffer<double>(sizes.gathered / static_cast<std::int64_t>(sizeof(double)));
}

void DeviceCommunicator::require_room(std::int64_t bytes, const char* name) const {
  if (bytes > largest_message_)
    throw error(ExitCode::internal, "exchange of {}: {} bytes, where at most {} were announced", name, bytes,
                largest_message_);
}

void DeviceCommunicator::all_gather(void* all, std::span<const std::int64_t> bytes, const char* name) {
  const std::int64_t begin = total(bytes.first(static_cast<std::size_t>(rank())));
  all_gather(static_cast<std::byte*>(all) + begin, all, bytes, name);
}

void DeviceCommunicator::all_gather(const void* own, void* all, std::span<const std::int64_t> bytes, const char* name) {
  const std::int64_t begin = total(bytes.first(static_cast<std::size_t>(rank())));
  const std::int64_t own_bytes = bytes[static_cast<std::size_t>(rank())];
  if (size() == 1) {
    if (own != all) device::copy(execution_, all, own, own_bytes, Direction::on_device);
    return;
  }
  require_room(total(bytes), name);
  const Measured measured(*this, name, own_bytes * (size() - 1));
  if (std::byte* const place = static_cast<std::byte*>(all) + begin; is_direct(all)) {
    if (own != place) device::copy(execution_, place, own, own_bytes, Direction::on_device);
    return write_to_all(place, own_bytes, own, own_bytes, 1);
  } else if (bounce_.data() != nullptr) {
    if (own != place) device::copy(execution_, place, own, own_bytes, Direction::on_device);
    return all_gather_through(bounce_.data(), all, bytes);
  }
  if (gpus_ != nullptr) return gpus_->all_gather(own, all, bytes, execution_.stream);
  if (!staged_) return ranks_->all_gather_uneven(own, all, bytes);
  std::byte* host = staged_receive_.data();
  device::copy(execution_, host + begin, own, own_bytes, Direction::to_host);
  kernels::fence(execution_);
  ranks_->all_gather_uneven(host + begin, host, bytes);
  device::copy(execution_, all, host, total(bytes), Direction::to_device);
}

void DeviceCommunicator::all_gather(void* all, std::span<const std::int64_t> bytes, const ExchangeBuffer& through,
                                    const char* name) {
  if (size() == 1 || !is_direct(through.data())) return all_gather(all, bytes, name);
  require_room(total(bytes), name);
  const Measured measured(*this, name, bytes[static_cast<std::size_t>(rank())] * (size() - 1));
  all_gather_through(through.data(), all, bytes);
}

void DeviceCommunicator::all_gather_if(const std::uint32_t* needed, kernels::Array<std::uint32_t> all,
                                       const char* name) {
  if (size() == 1) return;
  const std::int64_t bytes = all.size / size() * static_cast<std::int64_t>(sizeof(std::uint32_t));
  if (!is_direct())
    return all_gather(all.data, std::vector<std::int64_t>(static_cast<std::size_t>(size()), bytes), name);
  const Measured measured(*this, name, bytes * (size() - 1));
  channel_->all_gather_if(execution_, needed, all);
}

void DeviceCommunicator::all_gather_through(std::byte* bounce, void* all, std::span<const std::int64_t> bytes) {
  const std::int64_t begin = total(bytes.first(static_cast<std::size_t>(rank()))),
                     own_bytes = bytes[static_cast<std::size_t>(rank())], end = begin + own_bytes;
  std::byte* const to = static_cast<std::byte*>(all);
  write_to_all(bounce + begin, own_bytes, to + begin, own_bytes, 1);
  // No further barrier: the next exchange begins with one, which orders it after these copies on every rank.
  device::copy(execution_, to, bounce, begin, Direction::on_device);
  device::copy(execution_, to + end, bounce + end, total(bytes) - end, Direction::on_device);
}

/// Writes rows to all ranks from memory of the same pitch. Each rank begins with a different peer, so that not all
/// write to one GPU at a time.
void DeviceCommunicator::write_to_all(void* place, std::int64_t pitch, const void* from, std::int64_t row_bytes,
                                      std::int64_t rows) {
  channel_->begin(execution_);
  for (int step = 1; step < size(); ++step)
    channel_->write(execution_, (rank() + step) % size(), place, pitch, from, pitch, row_bytes, rows);
  channel_->end(execution_);
}

void DeviceCommunicator::all_gather_rows(const kernels::AnyMatrix& all, std::span<const Range> of_rank,
                                         const char* name) {
  const Range own = of_rank[static_cast<std::size_t>(rank())];
  const kernels::AnyMatrix rows = all.rows_from(own.begin, own.size());
  const std::int64_t element = kernels::bytes_of(all.type);
  const Measured measured(*this, name, own.size() * all.columns * element * (size() - 1));
  WEFT_ASSERT(is_direct(all.data));
  write_to_all(rows.data, rows.stride * element, rows.data, rows.columns * element, rows.rows);
}

void DeviceCommunicator::send_to_owners(const void* send, std::span<const std::int64_t> bytes, void* receive,
                                        const char* name) {
  const std::int64_t own_bytes = bytes[static_cast<std::size_t>(rank())];
  if (!is_direct(receive))
    return all_to_all(send, bytes, receive, std::vector<std::int64_t>(bytes.size(), own_bytes), name);
  const Measured measured(*this, name, total(bytes) - own_bytes);
  channel_->begin(execution_);
  for (int step = 1; step <= size(); ++step) {
    const int peer = (rank() + step) % size();  // this rank is the last
    const std::int64_t piece = bytes[static_cast<std::size_t>(peer)];
    channel_->write(execution_, peer, static_cast<std::byte*>(receive) + rank() * piece, piece,
                    static_cast<const std::byte*>(send) + total(bytes.first(static_cast<std::size_t>(peer))), piece,
                    piece, 1);
  }
  channel_->end(execution_);
}

void DeviceCommunicator::sum_rows(const kernels::AnyMatrix& rows, void* gathered, const char* name) {
  const std::int64_t bytes = rows.rows * rows.columns * kernels::bytes_of(rows.type);
  if (is_direct() && bytes <= Peers::Channel::kMostRows && bytes % 16 == 0) {
    const Measured measured(*this, name, kernels::cuda::bytes_of_row_sum(bytes, size()));
    return channel_->sum_rows(execution_, rows);
  }
  all_gather(rows.data, gathered, std::vector<std::int64_t>(static_cast<std::size_t>(size()), bytes), name);
  kernels::sum_parts(execution_, {gathered, rows.type, size() * rows.rows, rows.columns, rows.columns}, size(), rows);
}

void DeviceCommunicator::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                                    std::span<const std::int64_t> receive_bytes, const char* name) {
  const Measured measured(*this, name, total(send_bytes) - send_bytes[static_cast<std::size_t>(rank())]);
  if (gpus_ != nullptr) return gpus_->all_to_all(send, send_bytes, receive, receive_bytes, execution_.stream);
  if (!staged_) return ranks_->all_to_all(send, send_bytes, receive, receive_bytes);
  require_room(std::max(total(send_bytes), total(receive_bytes)), name);
  device::copy(execution_, staged_send_.data(), send, total(send_bytes), Direction::to_host);
  kernels::fence(execution_);
  ranks_->all_to_all(staged_send_.data(), send_bytes, staged_receive_.data(), receive_bytes);
  device::copy(execution_, receive, staged_receive_.data(), total(receive_bytes), Direction::to_device);
}

/// Applies `combine` to a copy of the values in host memory.
template <class T, class Combine>
void DeviceCommunicator::through_the_host(kernels::Array<T> values, Combine&& combine) {
  std::vector<T> host(static_cast<std::size_t>(values.size));
  const std::int64_t bytes = values.size * static_cast<std::int64_t>(sizeof(T));
  device::copy(execution_, host.data(), values.data, bytes, Direction::to_host);
  kernels::fence(execution_);
  combine(std::span<T>(host));
  device::copy(execution_, values.data, host.data(), bytes, Direction::to_device);
  kernels::fence(execution_);  // before `host` is freed
}

void DeviceCommunicator::sum(kernels::Array<std::int64_t> values, const char* name) {
  if (size() == 1) return;
  const Measured measured(*this, name, bytes_of_reduction(values.size * 8, size()));
  if (is_direct_reduction(values.size * 8)) return channel_->sum(execution_, values);
  if (gpus_ != nullptr)
    return gpus_->all_reduce(values.data, values.size, nccl::Integer::int64, nccl::Reduction::sum, execution_.stream);
  through_the_host(values, [this](std::span<std::int64_t> host) { ranks_->sum(host); });
}

void DeviceCommunicator::maximum(kernels::Array<std::int32_t> values, const char* name) {
  if (size() == 1) return;
  const Measured measured(*this, name, bytes_of_reduction(values.size * 4, size()));
  if (is_direct_reduction(values.size * 4)) return channel_->maximum(execution_, values);
  if (gpus_ != nullptr)
    return gpus_->all_reduce(values.data, values.size, nccl::Integer::int32, nccl::Reduction::maximum,
                             execution_.stream);
  through_the_host(values, [this](std::span<std::int32_t> host) {
    std::vector<std::int64_t> wide(host.begin(), host.end());
    ranks_->maximum(wide);
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<std::int32_t>(wide[i]);
  });
}

void DeviceCommunicator::sum(kernels::Array<double> values, const char* name) {
  if (size() == 1) return;
  WEFT_ASSERT(values.size <= kMostValues);
  const Measured measured(*this, name, values.size * 8 * (size() - 1));
  if (is_direct()) return channel_->sum(execution_, values);
  if (gpus_ == nullptr) return through_the_host(values, [this](std::span<double> host) { ranks_->sum(host); });
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(size()), values.size * 8);
  device::copy(execution_, gathered_.data() + rank() * values.size, values.data, values.size * 8, Direction::on_device);
  gpus_->all_gather(gathered_.data() + rank() * values.size, gathered_.data(), bytes, execution_.stream);
  device::zero(execution_, values.data, values.size * 8);
  for (int r = 0; r < size(); ++r)
    kernels::accumulate(execution_, {gathered_.data() + r * values.size, values.size}, values);
}

}  // namespace weft::parallel

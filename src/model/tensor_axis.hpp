// SPDX-License-Identifier: Apache-2.0
//
// The tensor axis: ranks that hold parts of the same matrices and compute on the same rows (Shoeybi et al. 2019, arXiv
// 1909.08053). What they exchange within a layer.
//
// Contributions are added in rank order, in fp32: every rank gets the same bits. With T ranks, of R rows of C elements
// a rank sends 2 R C (T - 1) / T elements: each rank sums a part of the rows, then all receive it. Of few rows each
// rank sends all, R C (T - 1) elements, and all ranks form the same sums: one exchange in place of two. GPUs that
// access each other's memory do both in one kernel (kernels/peers/peers_cuda.hpp).
//
// A sum of rows has a start and an end, between which the computation can do other work:
//
//   axis.start_sum(rows, name);   // once the work so far has formed this rank's contribution
//   …                             // work that neither reads nor writes `rows`
//   axis.await(rows);             // later work finds the sums there
//
// With `overlap`, exchanges between GPUs run on a separate stream. Otherwise, and on the host, they take place in
// `await`: work that reads rows too early finds there what this rank alone has formed. The bits are the same.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "device/stream.hpp"
#include "model/step_arena.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::model {

class TensorAxis {
 public:
  /// Memory of the exchanges; empty if the axis has one rank.
  struct Buffers {
    Buffers() = default;
    /// Memory for sums of up to `rows` rows of `columns` elements, and for gathering up to `gathered` bytes of a rank.
    Buffers(const parallel::GridShape&, kernels::Scalar type, std::int64_t rows, std::int64_t columns,
            std::int64_t gathered, StepArena&);
    parallel::ExchangeBuffer received;
    std::int64_t largest_message = 0;
  };

  /// Sums that may be under way at a time.
  static constexpr std::size_t kMostSums = 2;

  /// The grid must outlive the object. Collective. The axis has more than one rank.
  TensorAxis(const parallel::Grid&, const kernels::Execution&, Buffers&&, bool overlap);

  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }

  /// rows [n, columns], contiguous, fp32, bf16 or fp16, are to become the sums over the ranks. Collective.
  void start_sum(kernels::AnyMatrix rows, const char* name);
  /// No effect if no sum of these rows is under way. Collective.
  void await(kernels::AnyMatrix rows);
  /// Most bytes of a rank that `gather` takes.
  std::int64_t most_gathered() const { return buffers_.largest_message / size(); }
  /// The values of all ranks, in rank order, `size` each; until the next call. Collective.
  template <class T>
  kernels::Array<const T> gather(kernels::Array<T> values, const char* name) {
    return {reinterpret_cast<const T*>(gather(values.data, values.size * static_cast<std::int64_t>(sizeof(T)), name)),
            size() * values.size};
  }
  /// Sums over the ranks of the axis, in place and in rank order: the same bits on all ranks. Collective.
  void sum(kernels::Array<double> values, const char* name);

  bool leaves_the_host_free() const { return ranks_.leaves_the_host_free(); }
  bool is_timed() const { return ranks_.is_timed(); }
  const parallel::Exchanges& exchanges() const { return ranks_.exchanges(); }
  /// When the computation waits for exchanges, `idle` counts it; null: not.
  void mark(device::IdleClock* idle);

 private:
  struct Sum {
    kernels::AnyMatrix rows;  // none: free
    const char* name = nullptr;
    device::Event arrived;
  };

  const kernels::Execution& communication() const { return stream_ ? stream_->execution() : execution_; }
  void begin();
  void await(const device::Event& event);
  void end();
  void exchange(kernels::AnyMatrix rows, const char* name);
  const std::byte* gather(const void* own, std::int64_t bytes, const char* name);

  const kernels::Execution execution_;
  std::optional<device::Stream> stream_;  // stream of the exchanges; empty: that of the computation
  Buffers buffers_;
  parallel::DeviceCommunicator ranks_;
  device::IdleClock* idle_ = nullptr;
  device::Event computed_, exchanged_;
  std::array<Sum, kMostSums> sums_;
};

}  // namespace weft::model

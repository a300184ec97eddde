// SPDX-License-Identifier: Apache-2.0
//
// Owner of every buffer of a step. Each class of the step has a `struct Buffers` whose constructor takes its buffers
// from an arena. The same constructor runs with an arena that allocates and, for the memory plan, with one that only
// measures; so plan and allocation cannot differ.
//
// An arena that measures needs no device and no ranks: a plan may be for another machine. Sizes are those of the
// largest rank: Buffers depend on a GridShape, never on a rank, and are of one size on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device/memory.hpp"
#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "parallel/exchange_buffer.hpp"
#include "parallel/grid.hpp"

namespace weft::model {

class StepArena {
 public:
  using Where = device::Allocation::Where;

  /// Bytes of one purpose on one rank.
  struct Bytes {
    std::string purpose;
    std::int64_t device = 0;
    std::int64_t host = 0;
  };

  /// Measures: arrays have a size and no data.
  explicit StepArena(kernels::Backend backend) : backend_(backend) {}
  /// Allocates. The grid must outlive the arena.
  StepArena(const kernels::Execution& execution, const parallel::Grid& grid)
      : backend_(execution.backend), grid_(&grid) {}

  /// The backend of the kernels, on which the sizes of workspaces depend.
  kernels::Backend backend() const { return backend_; }

  /// Buffers taken from now on count under this name ("forward pass"). Returns the arena.
  StepArena& purpose(std::string_view name);

  /// `size` elements where the kernels run, not initialised; freed with the arena. Throws Error(usage) when there is
  /// not enough memory.
  template <class T>
  kernels::Array<T> take(std::int64_t size) {
    return {static_cast<T*>(take_bytes(Where::device, size * static_cast<std::int64_t>(sizeof(T)))), size};
  }
  /// `size` elements in host memory, like `take`; page-locked in a CUDA build.
  template <class T>
  kernels::Array<T> take_host(std::int64_t size) {
    return {static_cast<T*>(take_bytes(Where::host, size * static_cast<std::int64_t>(sizeof(T)))), size};
  }
  /// A matrix [rows, columns] whose rows follow one another, like `take`.
  kernels::AnyMatrix take_matrix(kernels::Scalar type, std::int64_t rows, std::int64_t columns) {
    return {take_bytes(Where::device, rows * columns * kernels::bytes_of(type)), type, rows, columns, columns};
  }
  /// Memory that the ranks of an axis exchange; empty when measuring. Collective.
  parallel::ExchangeBuffer exchange(std::string_view axis, std::int64_t bytes,
                                    const parallel::ExchangeStrategy& strategy = {});
  /// True if GPUs along the axis write into one another's memory, so that no staging memory is needed. A plan cannot
  /// determine this and counts the staging memory.
  bool is_direct(std::string_view axis, const parallel::ExchangeStrategy& strategy) const;
  /// Counts the memory of a DeviceCommunicator of `n_ranks`.
  void communicator(std::int64_t n_ranks, std::int64_t largest_message);
  /// Counts memory that a part of the step allocates itself.
  void count(Where where, std::int64_t bytes);

  /// What was taken, by purpose, in the order of first use.
  const std::vector<Bytes>& bytes() const { return bytes_; }
  std::int64_t device_bytes() const;
  std::int64_t host_bytes() const;

 private:
  void* take_bytes(Where where, std::int64_t bytes);

  kernels::Backend backend_;
  const parallel::Grid* grid_ = nullptr;  // null: measures
  std::vector<device::Allocation> memory_;
  std::vector<Bytes> bytes_;
  std::size_t present_ = 0;  // index in bytes_
};

}  // namespace weft::model

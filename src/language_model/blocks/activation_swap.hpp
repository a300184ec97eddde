// SPDX-License-Identifier: Apache-2.0
//
// Activations in host memory between forward and backward pass (memory.swap_activations).
//
// On the device are the kept activations of two blocks: even blocks use the first set of arrays, odd blocks the second.
//
//   forward     block l is computed in one set while that of block l - 1 is copied to host memory
//   backward    block l is computed in one set while that of block l - 1 is copied back
//
// The last two blocks are never copied: their sets are still there when the backward pass begins. What memory.recompute
// does not keep is not copied either. Copies are on a stream for each direction, ordered by events, and are part of a
// captured step. Every copy of a forward pass is awaited by its last two blocks, and every copy of a backward pass by a
// block of it: nothing is pending afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/stream.hpp"
#include "kernels/language/norm/norm.hpp"
#include "model/step_arena.hpp"

namespace weft::language_model {

/// Blocks whose activations are on the device at a time.
inline constexpr std::int64_t kResidentBlocks = 2;

class ActivationSwap {
 public:
  struct Buffers {
    std::vector<kernels::Array<std::byte>> sets[kResidentBlocks];  ///< kept arrays of a block
    std::vector<kernels::Array<std::byte>> host;                   ///< of each block but the last two

    /// Adds an array to set 0 or 1.
    void add(std::size_t set, const kernels::AnyMatrix& array) {
      add_bytes(set, array.data, array.rows * array.stride * kernels::bytes_of(array.type));
    }
    template <class T>
    void add(std::size_t set, const kernels::Array<T>& array) {
      add_bytes(set, array.data, array.size * static_cast<std::int64_t>(sizeof(T)));
    }
    void add(std::size_t set, const kernels::NormStatistics& statistics) {
      add(set, statistics.mean);
      add(set, statistics.inverse);
    }
    /// Takes page-locked memory for a model of `blocks` blocks. Call it after all arrays have been added.
    void take_host(std::size_t blocks, model::StepArena&);
    /// Bytes of the kept arrays of a block.
    std::int64_t bytes() const;

   private:
    void add_bytes(std::size_t set, const void* data, std::int64_t bytes);
  };

  ActivationSwap(const kernels::Execution&, const Buffers&);

  /// Calls around the forward pass of a block, blocks in order.
  void before_forward(std::size_t block);
  void after_forward(std::size_t block);
  /// Calls around the backward pass of a block, blocks in reverse order.
  void before_backward(std::size_t block);
  void after_backward(std::size_t block);

 private:
  bool is_swapped(std::size_t block) const { return block < buffers_.host.size(); }
  template <class Copy>
  void copy(std::size_t block, const Copy&) const;

  const kernels::Execution execution_;
  const Buffers buffers_;
  device::Stream out_, in_;
  device::Event computed_, stored_[kResidentBlocks], fetched_[kResidentBlocks];
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// Rows of which every rank of the feature axis forms its own slice and needs all: normalised inputs and gradient rows.
//
// Where an exchange can go on beside the computation (several GPUs), rows travel in blocks of whole layers: a block is
// gathered while the next is formed, or while the one before is used. GPUs that write into one another's memory form
// and gather a block in its place. Through NCCL, own columns of a block lie together, so that one all-gather moves
// them; what arrives is copied to its columns of the whole rows. Otherwise there is one block, formed and gathered in
// place.
#pragma once

#include <vector>

#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/array.hpp"
#include "parallel/device_communicator.hpp"
#include "parallel/grid.hpp"

namespace weft::transcoder {

struct TokenLayout;

/// Layers [0, L) cut into blocks of layers that grow: the first has nothing to hide behind, neither as the first that
/// is encoded nor as the last that is decoded.
std::vector<parallel::Range> layer_blocks(std::int64_t n_layers, std::int64_t n_blocks);

class RowGather {
 public:
  /// What all exchanges of a step share: the axis, whose execution works beside the computation's, the blocks, and
  /// memory for what arrives.
  struct Lane {
    const parallel::Communicator& ranks;
    parallel::DeviceCommunicator& axis;
    const kernels::Execution& execution;  ///< the computation's
    const kernels::Execution& beside;     ///< the axis'; the same where nothing can go on beside
    device::IdleClock& idle;
    std::vector<parallel::Range> blocks;
    std::int64_t d_model;
    kernels::Scalar scalar;
    std::byte* arriving;  ///< [group tokens, columns of the largest block]; null where rows go straight to their place
  };

  /// Bytes for at most `own_tokens` rows of `width` columns in `n_blocks` blocks, where they are not formed in place.
  static std::int64_t bytes(std::int64_t own_tokens, std::int64_t width, std::int64_t n_blocks, kernels::Scalar);

  /// `name`: what the rows are, for the profile.
  RowGather(const Lane& lane, const char* name, std::int64_t own_tokens, std::int64_t width);

  /// Where the own rows of a block are to be written, [own tokens, its columns]. `all`: [group tokens, L * d], in an
  /// ExchangeBuffer.
  kernels::AnyMatrix own(const TokenLayout&, const kernels::AnyMatrix& all, std::size_t block) const;
  /// Own rows of a block have been given to the computation: they go to all ranks.
  void send(const TokenLayout&, const kernels::AnyMatrix& all, std::size_t block);
  /// The computation goes on when a block, and all that were sent before it, are in their place in `all`.
  void wait(std::size_t block, const kernels::Execution& computation);

 private:
  bool in_place() const { return lane_.arriving == nullptr; }
  std::int64_t columns(std::size_t block) const { return lane_.blocks[block].size() * lane_.d_model; }

  const Lane& lane_;
  const char* name_;
  parallel::ExchangeBuffer own_;  // block after block, each [own tokens, its columns]; empty: in place
  device::Event formed_;
  std::vector<device::Event> arrived_;  // by block
};

}  // namespace weft::transcoder

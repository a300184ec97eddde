// SPDX-License-Identifier: Apache-2.0
//
// Gathers rows of which every rank of the feature axis forms one slice and needs all: normalised inputs and gradient
// rows.
//
// Where exchanges overlap with computation (feature_axis.hpp), rows are sent in blocks of whole layers: a block is
// gathered while the next is formed, or while the one before is used. GPUs that write into one another's memory form
// and gather a block in its place. With NCCL, the columns of a block that this rank forms are contiguous, so that one
// all-gather moves them; received columns are copied from staging memory to their places in the rows. With one block,
// rows are formed and gathered in place.
#pragma once

#include <vector>

#include "device/stream.hpp"
#include "kernels/array.hpp"
#include "transcoder/axes/feature_axis.hpp"

namespace weft::transcoder {

struct TokenLayout;

class RowGather {
 public:
  struct Buffers {
    Buffers() = default;
    Buffers(const FeatureAxisSizes&, model::StepArena&);
    parallel::ExchangeBuffer own;  ///< block after block, each [own tokens, its columns]; empty: in place
  };

  /// `name`: name of these exchanges in statistics. The axis and the buffers must outlive this object.
  RowGather(const FeatureAxis&, const char* name, const Buffers&);

  /// Memory to which this rank writes its own rows of a block, [own tokens, columns of the block]. `all`: [group
  /// tokens, L * d], in an ExchangeBuffer.
  kernels::AnyMatrix own(const TokenLayout&, const kernels::AnyMatrix& all, std::size_t block) const;
  /// Sends this rank's rows of a block to all ranks after the computation submitted so far has formed them. Collective.
  void send(const TokenLayout&, const kernels::AnyMatrix& all, std::size_t block);
  /// Makes later work on `computation` wait until a block, and all blocks sent before it, are in their place in `all`.
  void wait(std::size_t block, const kernels::Execution& computation);

 private:
  bool in_place() const { return axis_.staging == nullptr; }
  std::int64_t columns(std::size_t block) const { return axis_.blocks[block].size() * axis_.d_model; }

  const FeatureAxis& axis_;
  const char* name_;
  const Buffers& buffers_;
  device::Event formed_;
  std::vector<device::Event> arrived_;  // arrival of each block
};

}  // namespace weft::transcoder

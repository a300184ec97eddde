// SPDX-License-Identifier: Apache-2.0
//
// The update of matrices whose optimizer state is in host memory (Moments::on_host).
//
// The state of a block of rows is copied to the device, updated there in place, and copied back:
//
//   copies in      | block 0 | block 1 | block 2 | …
//   update                   | block 0 | block 1 | …
//   copies out                         | block 0 | …
//
// kBuffers buffers are used in turn, two for each direction, so that both directions of the link are busy all the time.
// The copies run on separate streams, ordered by events; a captured step contains them. The arithmetic is that of
// the update where the state lies on the device: the same bits.
//
// On the host copies are done when a call returns.
#pragma once

#include <cstdint>
#include <span>

#include "device/stream.hpp"
#include "model/parameters.hpp"
#include "model/step_arena.hpp"

namespace weft::model {

class StateStream {
 public:
  static constexpr int kBuffers = 4;
  /// Large enough that a copy runs at the speed of the link, small compared with the state of any model that needs it.
  static constexpr std::int64_t kBufferBytes = std::int64_t{16} << 20;

  struct Buffers {
    Buffers() = default;
    /// `most`: bytes of a buffer, but at least one row of every matrix.
    Buffers(std::span<const ParameterSpec> specs, kernels::StorageType, StepArena&, std::int64_t most = kBufferBytes);
    kernels::Array<std::byte> blocks[kBuffers];
  };

  StateStream(const kernels::Execution&, const Buffers&);

  /// Before the first matrix of a step.
  void begin();
  /// Updates all rows of `parameters`, whose state is in page-locked host memory, like kernels::adam_rows.
  void update(const kernels::ParameterRows& parameters, kernels::Matrix<const float> gradient,
              const kernels::AdamStep* step);
  /// After the last one: later work on the execution waits until the state is back in host memory.
  void end();

 private:
  const kernels::Execution execution_;
  const Buffers buffers_;
  device::Stream in_, out_;
  device::Event begun_, ended_;
  device::Event arrived_[kBuffers], updated_[kBuffers], returned_[kBuffers];
  std::int64_t blocks_ = 0;  // blocks of this step
};

}  // namespace weft::model

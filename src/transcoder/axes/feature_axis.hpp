// SPDX-License-Identifier: Apache-2.0
//
// The feature axis of a step: ranks that work on the same tokens and hold different features. Inputs, partial
// reconstructions and gradient rows are exchanged along it.
//
// On several GPUs these rows are cut into blocks of layers and exchanged on a communication stream while the
// computation works on other blocks. Otherwise there is one block, exchanged on the computation's stream. The results
// have the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "device/stream.hpp"
#include "model/step_arena.hpp"
#include "parallel/device_communicator.hpp"
#include "parallel/grid.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// Type (fp32 or bf16) of inputs, products, partial reconstructions and gradient rows.
kernels::Scalar scalar_of(Precision);

/// Layers [0, L) cut into n blocks, of sizes as 1 : 3 : 4 ... n : 2. No work overlaps with the inputs of the first
/// block, so it is the smallest. Little work overlaps with the partial sums and the gradient rows of the last one, but
/// the gradient rows of the other blocks arrive while the backward pass of its targets runs.
std::vector<parallel::Range> layer_blocks(std::int64_t n_layers, std::int64_t n_blocks);

/// Sizes of the exchanges of one step, on the largest rank.
struct FeatureAxisSizes {
  /// `max_tokens`: tokens of the largest batch, over all ranks.
  FeatureAxisSizes(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t max_tokens);

  parallel::ExchangeStrategy strategy;
  kernels::Scalar scalar;
  bool overlap;             ///< exchanges have a stream of their own
  std::int64_t group, own;  ///< tokens of a feature group; its tokens of one rank
  std::int64_t width;       ///< L * d
  std::int64_t n_blocks;    ///< number of blocks of layers
  std::int64_t columns;     ///< columns of the largest block

  std::int64_t largest_message() const { return bytes(group * width); }
  std::int64_t bytes(std::int64_t elements) const { return elements * kernels::bytes_of(scalar); }
  /// True if rows of a block pass through staging memory (row_gather.hpp).
  bool staged(const model::StepArena&) const;
};

/// Communicator, streams and blocks that all exchanges of a step share.
struct FeatureAxis {
  parallel::DeviceCommunicator& ranks;      ///< enqueues on the communication stream
  const kernels::Execution& computation;    ///< execution on the computation's stream
  const kernels::Execution& communication;  ///< the communication stream; the computation's without overlap
  device::IdleClock& idle;                  ///< waiting time of the computation
  std::vector<parallel::Range> blocks;      ///< blocks of layers
  std::int64_t d_model;
  kernels::Scalar scalar;
  std::byte* staging;  ///< [group tokens, columns of the largest block]; null where rows need none
};

}  // namespace weft::transcoder

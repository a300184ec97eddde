// SPDX-License-Identifier: Apache-2.0
//
// Memory, bytes and work of a run, from sizes alone: no device is started and nothing is allocated. Printed before step
// 0 and by --dry-run, where the grid may be that of another machine (parallel.world).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dataset/activations/description.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// Plan of a run. Bytes are those of the rank with most, unless stated otherwise.
struct Plan {
  Shape shape;
  parallel::GridShape grid;
  std::vector<std::pair<std::string, std::int64_t>> device;  ///< by purpose: weights, moments, step buffers
  std::vector<std::pair<std::string, std::int64_t>> host;    ///< loader, staging of the step and of checkpoints
  std::int64_t checkpoint_bytes = 0;                         ///< one checkpoint, all ranks together
  std::int64_t disk_bytes = 0;                               ///< the checkpoints kept, and one
  std::int64_t read_bytes_per_step = 0;                      ///< activation rows, all ranks together
  std::int64_t optimizer_bytes_per_step = 0;                 ///< weights and moments read and written, per rank
  std::int64_t feature_bytes_per_step = 0;                   ///< sent by one rank on the feature axis
  std::int64_t data_bytes_per_step = 0;                      ///< sent by one rank on the data axis
  double encoder_flops_per_step = 0;                         ///< the dense product, per rank
  double steps_per_epoch = 0;                                ///< 0: number of rows unknown
  parallel::GridShape quietest;                              ///< grid of as many ranks that sends the fewest bytes
  std::int64_t quietest_bytes_per_step = 0;                  ///< sent by one rank of that grid, on both axes

  std::int64_t device_total() const;
  std::int64_t host_total() const;
};

Plan plan(const Configuration&, const dataset::Description&, const parallel::GridShape&);

/// GPU memory of a process of a CUDA build before its own allocations: context, kernels and libraries. Measured
/// (docs/performance.md).
constexpr std::int64_t kContextBytes = std::int64_t{640} << 20;

/// Returns why a run cannot start if a rank may use `available` bytes of host memory, with the largest
/// transcoder.features and data.batch_tokens that fit; "" if it fits or the memory is not known (0). Without a GPU the
/// plan's device memory is host memory too. `limit`: what limits it, for the message.
std::string lacks_host_memory(const Configuration&, const dataset::Description&, const parallel::GridShape&,
                              std::int64_t available, const std::string& limit);

/// Returns data.micro_tokens or, where it is 0, the number of tokens to decode at a time so that the run fits into
/// `available` bytes of a device. Throws a collective Error(usage) that names sizes that fit.
std::int64_t micro_tokens_that_fit(const Configuration&, const dataset::Description&, const parallel::GridShape&,
                                   std::int64_t available);

/// Text for the plan of a private run: its records.
std::string private_text(const Configuration&, const dataset::Description& train);

/// Returns a warning if another grid of as many ranks would send clearly less per step; otherwise "".
std::string grid_advice(const Plan&);

/// Formats the plan as a table for the log.
std::string to_text(const Plan&, const Configuration&);

/// Text that names the properties of a transcoder that the hand-written CUDA kernels do not support, which makes a
/// phase slow; "" if they support all. type: type of gradient rows and inputs.
std::string slow_paths_text(const Shape&, kernels::Scalar type);

}  // namespace weft::transcoder

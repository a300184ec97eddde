// SPDX-License-Identifier: Apache-2.0
//
// Memory and work of a run, from sizes alone: no device is started and nothing is allocated. Printed before step 0 and
// by
// --dry-run.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "language_model/architecture.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// The only grid so far: one process.
parallel::GridShape single_process();

struct Plan {
  Architecture architecture;
  std::int64_t parameters = 0;
  std::vector<std::pair<std::string, std::int64_t>> device;  ///< bytes by purpose: weights, moments, activations, …
  std::vector<std::pair<std::string, std::int64_t>> host;
  std::int64_t checkpoint_bytes = 0;
  std::int64_t disk_bytes = 0;    ///< (keep + 1) checkpoints
  double flops_per_token = 0;     ///< forward and backward pass, without recomputation
  std::int64_t train_tokens = 0;  ///< of the training set; 0: unknown

  std::int64_t device_total() const;
  std::int64_t host_total() const;
};

Plan plan(const Configuration&, const Architecture&, std::int64_t train_tokens);

/// GPU memory of a process of a CUDA build before its own allocations (docs/performance.md).
constexpr std::int64_t kContextBytes = std::int64_t{640} << 20;

/// Throws a collective Error(usage) if the run needs more than `host` bytes of host memory or `device` bytes of device
/// memory, with what reduces the need; 0: not known. `host_limit`: what limits host memory, for the message.
void require_memory(const Plan&, const Configuration&, std::int64_t host, const std::string& host_limit,
                    std::int64_t device);

/// A table for the log: sizes, memory by purpose, number types, length of the run.
std::string to_text(const Plan&, const Configuration&);

}  // namespace weft::language_model

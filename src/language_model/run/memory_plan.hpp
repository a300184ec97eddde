// SPDX-License-Identifier: Apache-2.0
//
// Memory and work of a run, from sizes alone: no device is started and nothing is allocated. Printed before step 0 and
// by
// --dry-run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/run/planned_bytes.hpp"
#include "language_model/step/transformer.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// The cost of memory.swap_activations per block and micro-batch, compared with that of memory.recompute = "block" with
/// the inputs of blocks swapped, which needs no more memory. For one H200: products at 660 TFLOP/s in 16 bits and 60 in
/// fp32, copies at 50 GB/s each way. The cost of a copy is the time that concurrent computation does not hide.
struct SwapCost {
  std::int64_t bytes = 0;        ///< copied each way
  double copy_seconds = 0;       ///< each way
  double forward_seconds = 0;    ///< of a block, which is what recomputation costs
  double added_seconds = 0;      ///< by swapping as configured
  double recompute_seconds = 0;  ///< added with recompute = "block"

  bool worthwhile() const { return added_seconds <= recompute_seconds; }
};

struct Plan {
  Architecture architecture;
  std::int64_t parameters = 0;
  std::int64_t trained = 0;                                  ///< of these; the others are frozen
  std::vector<std::pair<std::string, std::int64_t>> device;  ///< bytes by purpose: weights, moments, activations, …
  std::vector<std::pair<std::string, std::int64_t>> host;
  std::int64_t checkpoint_bytes = 0;
  std::int64_t disk_bytes = 0;    ///< the checkpoints kept, and one
  double flops_per_token = 0;     ///< forward and backward pass, without recomputation
  std::int64_t train_tokens = 0;  ///< of the training set; 0: unknown
  /// Bytes of the activations with each memory.recompute, in its order; without swapping.
  std::vector<std::pair<std::string, std::int64_t>> activations;
  std::optional<SwapCost> swap;  ///< with memory.swap_activations

  std::int64_t device_total() const;
  std::int64_t host_total() const;
};

Plan plan(const Configuration&, const Architecture&, std::int64_t train_tokens);

/// Settings of a Transformer for forward passes over at most `rows` rows: of `rank` of a grid, by default of one
/// process. The architecture is that of the whole model.
TransformerSettings forward_settings(const Configuration&, const Architecture&, std::int64_t rows,
                                     const parallel::GridShape& = {}, std::int64_t rank = 0);

struct GenerationSettings;

/// Memory of a model without moments and of a Transformer, of the rank of parallel.tensor whose part has these
/// settings; with the cache of a Generator if `generation` is given. architecture: of the whole model.
Plan forward_plan(const Configuration&, const Architecture&, const TransformerSettings& part,
                  const GenerationSettings* generation = nullptr);

/// Bytes of a model, without moments, and of a Transformer for forward passes, where the kernels run: of the rank of
/// parallel.tensor that needs most.
std::int64_t forward_bytes(const Configuration&, const Architecture&, std::int64_t rows);

/// Memory per rank, in bytes; 0: not known.
struct MemoryLimits {
  std::int64_t host = 0;
  std::string host_limit = {};  ///< what limits host memory, for messages
  std::int64_t device = 0;

  bool allow(const Plan&) const;
  /// True if the memory where the kernels run has a limit.
  bool known() const { return (kernels::kCudaBuild ? device : host) > 0; }
};

/// Throws a collective Error(usage) if the run needs more memory, with the largest micro-batch that fits and what else
/// reduces the need.
void require_memory(const Plan&, const Configuration&, const MemoryLimits&);

/// data.micro_tokens for an input that leaves the choice to the program: the largest divisor of the sequences of a rank
/// with which a step fits, in tokens; where none does, one sequence. A function of its arguments: the same on all
/// ranks. `plan`: of the run with that many tokens.
std::int64_t largest_micro_tokens(const Configuration&, const MemoryLimits&,
                                  const std::function<Plan(std::int64_t micro_tokens)>& plan);

/// Throws a collective Error(usage) if memory.swap_activations costs more time than recomputation would.
void require_worthwhile_swapping(const Plan&);

/// Lines that name what the hand-written CUDA kernels do not take of a model, which makes its phase slow; "" if they
/// take all. library: cuDNN takes attention, forward and backward.
std::string slow_paths_text(const Architecture&, kernels::Scalar type, bool library);

/// A table for the log: sizes, memory by purpose, number types, length of the run.
std::string to_text(const Plan&, const Configuration&);

}  // namespace weft::language_model

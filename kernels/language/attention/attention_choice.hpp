// SPDX-License-Identifier: Apache-2.0
// Choice of the implementation of attention for a call: the own kernels, or cuDNN's where it is faster. No run times
// them: the choice is an entry of the algorithm table, which `weft benchmark --tune` makes. The own kernels run for a
// shape without an entry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/language/attention/attention.hpp"

namespace weft::kernels {

enum class AttentionPass { forward, backward };

/// Sizes of a call that a choice depends on.
struct AttentionSizes {
  AttentionPass pass = AttentionPass::forward;
  std::int64_t sequences = 0, length = 0;
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;
  std::int64_t window = 0;  ///< 0: none
  Scalar type = Scalar::bf16;

  bool operator==(const AttentionSizes&) const = default;
};

AttentionSizes attention_sizes(AttentionPass, const Attention&, Scalar type);

/// The choice for some sizes on one GPU type with one cuDNN: plain values, written to and read from JSON.
struct AttentionRecord {
  AttentionSizes sizes;
  std::string gpu;           ///< the device's name
  std::int64_t library = 0;  ///< version of cuDNN, 91900 for 9.19.0; 0: absent
  AttentionImplementation implementation = AttentionImplementation::own;  ///< own or cudnn
  double own_milliseconds = 0;                                            ///< medians when it was tuned; 0: not timed
  double cudnn_milliseconds = 0;
};

/// Sets the algorithm table; before sizes are planned. The first entry that fits a call is used.
void use_attention_records(std::vector<AttentionRecord>);

/// The implementation that a call is planned to run on, own or cudnn: the requested one if this build and machine have
/// it and it takes such calls. Needs no GPU: an entry of another GPU is detected at the first call, which then runs on
/// the own kernels.
AttentionImplementation planned_attention(AttentionPass, const Attention&, Scalar type);

/// The entry of the algorithm table that `planned_attention` follows for `recorded`; null: none.
const AttentionRecord* attention_record(const AttentionSizes&);

/// Implementations of the calls so far in this process that cuDNN could take, once per sizes. Empty in a
/// build without cuDNN.
std::vector<AttentionRecord> attention_records_in_use();

/// Memory for `tune_attention`, of the sizes of an entry; matrices are of its type.
struct AttentionMemory {
  AnyMatrix inputs, gradients;  ///< [rows, queries | keys | values]
  AnyMatrix out, out_gradient;  ///< [rows, heads * head_size]
  Array<float> log_sum;         ///< [sequences * heads * length]
  Array<std::byte> workspace;   ///< tuning_workspace()
};
std::int64_t tuning_workspace(const Execution&, const AttentionSizes&);
/// Times both implementations and returns the entry of the faster. Synchronises: for `weft benchmark --tune` only.
/// Only in a build with cuDNN.
AttentionRecord tune_attention(const Execution&, const AttentionRecord&, const AttentionMemory&);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Times both implementations of attention, for `weft benchmark --tune` only. Only in a build with cuDNN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/execution.hpp"
#include "kernels/language/attention/attention_records.hpp"

namespace weft::kernels {

/// Memory for `tune_attention`, of the sizes of an entry; matrices are of its type.
struct AttentionMemory {
  AnyMatrix inputs, gradients;  ///< [rows, queries | keys | values]
  AnyMatrix out, out_gradient;  ///< [rows, heads * head_size]
  Array<float> log_sum;         ///< [sequences * heads * length]
  Array<std::byte> workspace;   ///< tuning_workspace()
};
std::int64_t tuning_workspace(const Execution&, const AttentionSizes&);
/// Times both implementations and returns the entry of the faster. Synchronises.
AttentionRecord tune_attention(const Execution&, const AttentionRecord&, const AttentionMemory&);

}  // namespace weft::kernels

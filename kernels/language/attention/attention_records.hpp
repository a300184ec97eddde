// SPDX-License-Identifier: Apache-2.0
//
// The algorithm table of attention: the implementation for a call, the own kernels, or cuDNN's where it is faster. No
// run times them: `weft benchmark --tune` makes the entries. The own kernels run for a shape without an entry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/language/attention/attention_shape.hpp"

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

/// The entry of the algorithm table for these sizes; null: none.
const AttentionRecord* attention_record(const AttentionSizes&);

}  // namespace weft::kernels

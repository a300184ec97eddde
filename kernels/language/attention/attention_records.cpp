// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention_records.hpp"

#include <algorithm>
#include <utility>

namespace weft::kernels {
namespace {

std::vector<AttentionRecord>& records() {
  static std::vector<AttentionRecord> all;
  return all;
}

}  // namespace

AttentionSizes attention_sizes(AttentionPass pass, const Attention& shape, Scalar type) {
  return {.pass = pass,
          .sequences = shape.sequences,
          .length = shape.length,
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_size = shape.head_size,
          .window = shape.window < shape.length ? shape.window : 0,  // a longer one hides nothing
          .type = type};
}

void use_attention_records(std::vector<AttentionRecord> given) { records() = std::move(given); }

const AttentionRecord* attention_record(const AttentionSizes& sizes) {
  const auto found = std::find_if(records().begin(), records().end(),
                                  [&](const AttentionRecord& each) { return each.sizes == sizes; });
  return found == records().end() ? nullptr : &*found;
}

}  // namespace weft::kernels

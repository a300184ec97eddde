// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention_choice.hpp"

#include <algorithm>
#include <utility>

#include "kernels/language/attention/attention_cudnn.hpp"

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

AttentionImplementation planned_attention(AttentionPass pass, const Attention& shape, Scalar type) {
  if constexpr (kCudnnBuild) {
    if (shape.implementation == AttentionImplementation::own || !cudnn::takes(shape, type))
      return AttentionImplementation::own;
    if (shape.implementation == AttentionImplementation::cudnn) return AttentionImplementation::cudnn;
    const AttentionRecord* const record = attention_record(attention_sizes(pass, shape, type));
    if (record != nullptr && record->implementation == AttentionImplementation::cudnn &&
        record->library == cudnn::version())
      return AttentionImplementation::cudnn;
  } else {
    static_cast<void>(pass), static_cast<void>(shape), static_cast<void>(type);
  }
  return AttentionImplementation::own;
}

std::vector<AttentionRecord> attention_records_in_use() {
  if constexpr (kCudnnBuild)
    return cudnn::records_in_use();
  else
    return {};
}

}  // namespace weft::kernels

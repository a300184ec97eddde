// SPDX-License-Identifier: Apache-2.0
//
// Attention of every row to all rows of its text, as in an encoder (Devlin et al. 2019), forward only:
//
//   s_ij = scale q_i . k_j        o_i = sum over j of softmax(s_i)_j v_j        over all rows j of the text of i
//
// Texts lie one after the other, without padding.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// Rows [begin, end) of a text.
struct TextRows {
  std::int64_t begin = 0, end = 0;
};

struct TextAttention {
  std::int64_t heads = 0, head_size = 0;
  float scale = 0;              ///< > 0
  Array<const TextRows> texts;  ///< [rows]: the text of each row, which includes the row; where the kernels run
};

/// queries, keys, values, out: [rows, heads * head_size], any strides, fp32, bf16 or fp16; arithmetic is fp32.
/// head_size is at most kLargestHead (attention_shape.hpp). Sums run over the rows of a text in their order.
void text_attention(const Execution&, const TextAttention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
                    AnyMatrix out);

}  // namespace weft::kernels

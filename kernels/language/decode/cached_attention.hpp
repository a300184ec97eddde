// SPDX-License-Identifier: Apache-2.0
//
// Attention of one new row per sequence against the keys and values of all rows before it, which a cache keeps. Masks,
// scale and soft cap are those of attention/attention.hpp; the result is that of its last row:
//
//   s_j = scale q . k_j        o = sum over j of softmax(s)_j v_j        max(0, position - window + 1) <= j <= position
//
// A cache is a matrix of keys and one of values, [cache rows, kv_heads * head_size] each. The rows of a sequence are in
// two parts: a prefix, which several sequences may share, and the rows that follow it.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// Rows of the cache with the keys and values of a sequence.
struct CachedSequence {
  std::int64_t prefix_begin = 0;  ///< cache row of position 0
  std::int64_t own_begin = 0;     ///< cache row of position `prefix`
  std::int32_t prefix = 0;        ///< positions of the first part
  std::int32_t end = 0;           ///< the sequence runs while its position is below `end`

  WEFT_HOST_DEVICE std::int64_t row(std::int32_t position) const {
    return position < prefix ? prefix_begin + position : own_begin + (position - prefix);
  }
};

struct CachedAttention {
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;
  float scale = 0;                        ///< > 0
  float softcap = 0;                      ///< 0: none
  std::int64_t window = 0;                ///< 0: all earlier keys
  std::int64_t longest = 0;               ///< positions are below this
  Array<const CachedSequence> sequences;  ///< [rows], where the kernels run
  Array<const std::int32_t> positions;    ///< [rows], of the new rows
};

/// Stores the new keys and values, each in the cache row of its position, and forms `out`. queries, out [rows, heads *
/// head_size], keys, values [rows, kv_heads * head_size], all matrices of one type (fp32, bf16 or fp16), any strides,
/// of the caches the same.
/// Rows of sequences that do not run leave the cache as it is; their output is 0. The order of summation depends on
/// positions alone: neither on the number of rows nor on where the parts of a sequence are.
///
/// On a GPU sequences, positions and the cached rows of earlier positions may be read while early kernels before this
/// one still run (launch_cuda.cuh). Between a kernel that writes them and this one there must be one that is not early,
/// or that allows the next only after its wait: in a step, `embed`.
void cached_attention(const Execution&, const CachedAttention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
                      AnyMatrix cached_keys, AnyMatrix cached_values, AnyMatrix out);

/// out[to[i]] = in[i] for to[i] >= 0, of the same type; `to` [rows of in], where the kernels run.
WEFT_KERNEL(store_rows, void(const Execution&, AnyMatrix in, Array<const std::int64_t> to, AnyMatrix out));

}  // namespace weft::kernels

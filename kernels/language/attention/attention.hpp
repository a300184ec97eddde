// SPDX-License-Identifier: Apache-2.0
//
// Causal attention without the matrix of scores (Dao et al. 2022), forward and backward:
//
//   s_ij = scale q_i . k_j        p_ij = exp(s_ij - lse_i)        o_i = sum over j of p_ij v_j
//
// over the keys j that row i may read: first_key[i] <= j <= i inside its sequence, and i - j < window if window > 0.
// With softcap c > 0, s is replaced by c tanh(s / c). Query head h reads key head h / (heads / kv_heads).
//
// Backward (delta_i = do_i . o_i):  dv_j = sum p_ij do_i,  ds_ij = p_ij (do_i . v_j - delta_i) [times 1 - (s / c)^2],
// dq_i = scale sum ds_ij k_j,  dk_j = scale sum ds_ij q_i. Two loops (over query blocks for dq, over key blocks for dk
// and dv): no atomics, the same bits in every run. No matrix of length x length.
//
// With dropout (Vaswani et al. 2017; GPT-2), o_i = sum over j of m_ij p_ij v_j, m_ij = 0 or 1 / (1 - probability), and
// in the backward pass m_ij p_ij stands for p_ij in dv, m_ij (do_i . v_j) for do_i . v_j in ds.
//
// CUDA: bf16 and fp16 with head sizes 32, 64 and 128 and rows of whole 16-byte words run on tensor cores; everything
// else runs through Kokkos, far slower; so does attention with dropout. cuDNN is a second implementation
// (attention_cudnn.hpp).
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/attention/attention_records.hpp"
#include "kernels/language/attention/attention_shape.hpp"

namespace weft::kernels {

/// Bytes of workspace. They depend on the implementation, so the algorithm table is set before sizes are planned.
std::int64_t attention_workspace(const Execution&, const Attention&, Scalar type);
std::int64_t attention_backward_workspace(const Execution&, const Attention&, Scalar type);

/// queries [rows, heads * head_size], keys and values [rows, kv_heads * head_size], any strides (views of a packed
/// projection), fp32, bf16 or fp16, all of one type; out [rows, heads * head_size]; log_sum [sequences * heads *
/// length]: lse.
void attention(const Execution&, const Attention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values, AnyMatrix out,
               Array<float> log_sum, Array<std::byte> workspace);

/// The gradients overwrite dq, dk, dv. They may be views of one packed matrix, which must not overlap the inputs.
void attention_backward(const Execution&, const Attention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
                        AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient, AnyMatrix dq, AnyMatrix dk,
                        AnyMatrix dv, Array<std::byte> workspace);

/// The implementation that a call is planned to run on, own or cudnn: the requested one if this build and machine have
/// it and it takes such calls. Needs no GPU: an entry of another GPU is detected at the first call, which then runs on
/// the own kernels.
AttentionImplementation planned_attention(AttentionPass, const Attention&, Scalar type);

/// Implementations of the calls so far in this process that cuDNN could take, once per sizes. Empty in a
/// build without cuDNN.
std::vector<AttentionRecord> attention_records_in_use();

/// Choice of the earlier blocks of keys that a block of queries reads (as in MoBA, Lu et al. 2025, per block of
/// queries): the `local` last ones, its own included, and of those before them the `best` with the largest product of
/// the mean query and the mean key; equal ones: the earlier. Blocks that the mask hides altogether are not candidates.
/// The mean query includes rows after a row of the block; keys and values that a row may not read stay hidden. No
/// gradient flows through the choice.
struct BlockChoice {
  std::int64_t local = 1;  ///< >= 1
  std::int64_t best = 0;
};

std::int64_t select_key_blocks_workspace(const Attention&);
/// Overwrites `kept` (Attention::kept). queries, keys: as for `attention`.
void select_key_blocks(const Execution&, const Attention&, const BlockChoice&, AnyMatrix queries, AnyMatrix keys,
                       Array<std::uint8_t> kept, Array<std::byte> workspace);

}  // namespace weft::kernels

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

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// Rows of a block of sparse attention.
inline constexpr std::int64_t kKeyBlock = 64;

/// Masks of attention probabilities. One depends on (seed, step, layer, global row, head, key) alone, so that ranks,
/// micro-batches and recomputation draw the same one.
struct AttentionDropout {
  float probability = 0;
  std::uint32_t layer = 0;         ///< below kMostDropoutLayers
  std::int64_t first_row = 0;      ///< global index of row 0 in the step
  std::int64_t first_head = 0;     ///< number of head 0 in the model
  const AdamStep* step = nullptr;  ///< its seed and number, where the kernels run; null: no dropout
};
inline constexpr std::uint32_t kMostDropoutLayers = 1 << 14;

/// Implementation that computes a call. The forward pass of one implementation can be followed by the backward pass of
/// the other. recorded: the implementation that the algorithm table names for the shape (attention_choice.hpp), else
/// own. cudnn: own where cuDNN does not take the call.
enum class AttentionImplementation { recorded, own, cudnn };

struct Attention {
  std::int64_t sequences = 0, length = 0;  ///< rows = sequences * length
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;
  float scale = 0;          ///< > 0
  float softcap = 0;        ///< 0: none
  std::int64_t window = 0;  ///< 0: all earlier keys
  /// First row, counted within its sequence, that each row may read (start of its document), at most the row itself:
  /// [rows]. Empty: 0.
  Array<const std::int32_t> first_key = {};
  /// Sparse attention: != 0 where a block of kKeyBlock queries reads a block of keys, [sequences, heads, blocks(),
  /// blocks()] (select_key_blocks). Every block reads itself. Empty: all blocks.
  Array<const std::uint8_t> kept = {};
  AttentionDropout dropout = {};
  AttentionImplementation implementation = AttentionImplementation::recorded;

  std::int64_t rows() const { return sequences * length; }
  std::int64_t blocks() const { return (length + kKeyBlock - 1) / kKeyBlock; }
  /// Number of elements of `kept`.
  std::int64_t block_pairs() const { return sequences * heads * blocks() * blocks(); }
};

/// Largest head size; a multiple of 8.
inline constexpr std::int64_t kLargestHead = 256;

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

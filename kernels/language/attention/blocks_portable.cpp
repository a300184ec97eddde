// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"
#include "kernels/language/attention/mask.hpp"
#include "kernels/portable.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {
namespace {

struct BlockPieces {
  Array<float> queries;  ///< means: [sequences, heads, blocks, head_size]
  Array<float> keys;     ///< [sequences, kv_heads, blocks, head_size]
  Array<float> scores;   ///< [sequences, heads, blocks, blocks]

  BlockPieces(Workspace& workspace, const Attention& shape)
      : queries(workspace.take<float>(shape.sequences * shape.heads * shape.blocks() * shape.head_size)),
        keys(workspace.take<float>(shape.sequences * shape.kv_heads * shape.blocks() * shape.head_size)),
        scores(workspace.take<float>(shape.sequences * shape.heads * shape.blocks() * shape.blocks())) {}
};

/// means[sequence, head, block]: of the rows of each block.
void average_blocks(const Execution& execution, const Attention& shape, std::int64_t heads, AnyMatrix rows,
                    Array<float> means) {
  const std::int64_t blocks = shape.blocks();
  const int head_size = static_cast<int>(shape.head_size);
  for_teams(
      execution, "average_blocks", shape.sequences * heads * blocks, kLargestHead * sizeof(float),
      KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() % blocks, head = team.league_rank() / blocks % heads;
        const std::int64_t sequence = team.league_rank() / blocks / heads;
        const std::int64_t begin = block * kKeyBlock;
        const int count = smaller(kKeyBlock, shape.length - begin);
        float* mean = means.data + std::int64_t{team.league_rank()} * head_size;
        auto& buffer = scratch<float[kLargestHead]>(team);
        for_columns(team, head_size, [&](int c) { mean[c] = 0.0f; });
        for (int m = 0; m < count; ++m) {
          const float* row =
              row_chunk(team, rows, sequence * shape.length + begin + m, head * head_size, head_size, buffer);
          for_columns(team, head_size, [&](int c) { mean[c] += row[c]; });
        }
        for_columns(team, head_size, [&](int c) { mean[c] /= static_cast<float>(count); });
      });
}

}  // namespace

std::int64_t select_key_blocks_workspace(const Attention& shape) {
  Workspace measure(nullptr);
  BlockPieces(measure, shape);
  return measure.bytes();
}

void select_key_blocks(const Execution& execution, const Attention& shape, const BlockChoice& choice, AnyMatrix queries,
                       AnyMatrix keys, Array<std::uint8_t> kept, Array<std::byte> workspace) {
  if (choice.local < 1) throw Error(ExitCode::internal, "select_key_blocks: a block must read itself");
  if (kept.size != shape.block_pairs() || workspace.size < select_key_blocks_workspace(shape))
    throw Error(ExitCode::internal, "select_key_blocks: kept or workspace have the wrong size");
  Workspace memory(workspace.data);
  const BlockPieces pieces(memory, shape);
  average_blocks(execution, shape, shape.heads, queries, pieces.queries);
  average_blocks(execution, shape, shape.kv_heads, keys, pieces.keys);
  const std::int64_t blocks = shape.blocks();
  const int head_size = static_cast<int>(shape.head_size);
  for_teams(
      execution, "select_key_blocks", shape.sequences * shape.heads * blocks, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t task = team.league_rank();
        const std::int64_t block = task % blocks, head = task / blocks % shape.heads;
        const std::int64_t sequence = task / blocks / shape.heads;
        const std::int64_t key_head = sequence * shape.kv_heads + head / (shape.heads / shape.kv_heads);
        const AttentionMask mask = mask_of(shape, sequence);
        const int begin = static_cast<int>(block * kKeyBlock);
        const int end = begin + smaller(kKeyBlock, shape.length - begin);
        int lower = begin;
        for (int row = begin; row < end; ++row) lower = smaller(lower, mask.lower(row));
        // Candidates: the blocks [first, last).
        const std::int64_t first = lower / kKeyBlock;
        const std::int64_t last = block + 1 > choice.local ? block + 1 - choice.local : 0;

        const float* query = pieces.queries.data + task * head_size;
        float* scores = pieces.scores.data + task * blocks;
        std::uint8_t* flags = kept.data + task * blocks;
        for (std::int64_t b = 0; b < blocks; ++b) {
          const bool local = b >= last && b <= block;
          float score = 0;
          if (b >= first && b < last) {
            const float* key = pieces.keys.data + (key_head * blocks + b) * head_size;
            score = sum_columns<float>(team, head_size, [&](int c) { return query[c] * key[c]; });
          }
          once(team, [&] {
            flags[b] = local ? 1 : 0;
            scores[b] = score;
          });
        }
        once(team, [&] {
          for (std::int64_t n = 0; n < choice.best; ++n) {
            std::int64_t best = -1;
            for (std::int64_t b = first; b < last; ++b)
              if (flags[b] == 0 && (best < 0 || scores[b] > scores[best])) best = b;
            if (best >= 0) flags[best] = 1;
          }
        });
      });
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Attention by blocks. A block of rows of one side (queries in the forward pass and for dq, keys for dk and dv) stays
// in scratch as panels: matrices [n][kLanes] whose lanes are rows of that block. Tiles of rows of the other side pass
// by. Scores of a tile are a panel too, so that every product has one form,
//
//   c[m][lane] (+)= sum over k of a(m, k) b[k][lane],
//
// every step of the softmax works on whole lanes, and the only transpositions are those of the block itself.
// Tiles and lanes that the mask hides are skipped. Sums run over keys (queries) in ascending order in one team: results
// do not depend on the number of threads.
//
// Rate of one core (AVX2, 2 x 8 products per cycle) in GFLOP/s, counting the causal half and 5 products in the backward
// pass, which computes 7; for comparison OpenBLAS' sgemm of one 64 x 64 x head size product. The products take half of
// the time; the rest is exp, maxima and masks, then the transposition of the block.
//
// clang-format off
//   length, head size    forward    backward    sgemm
//   128, 16                 13         20         38
//   128, 32                 26         25         64
//   256, 64                 30         33         64
//   256, 128                33         30         48
// clang-format on
#include <limits>

#include "kernels/language/attention/panels_portable.hpp"
#include "kernels/language/embedding/dropout.hpp"
#include "kernels/language/exponential.hpp"

namespace weft::kernels::portable {
namespace {

using namespace panels;

/// Dropout of the probabilities of one head of one sequence.
struct Dropping {
  DropoutRule rule;
  std::uint64_t seed = 0, step = 0;
  std::uint32_t layer;
  std::int64_t first_row;  ///< of the sequence, in the step
  std::int64_t head;
  bool active;

  KOKKOS_FORCEINLINE_FUNCTION Dropping(const Attention& shape, const DropoutRule& rule_, const Block& block,
                                       std::int64_t head_)
      : rule(rule_),
        layer(shape.dropout.layer),
        first_row(shape.dropout.first_row + block.first_row),
        head(shape.dropout.first_head + head_),
        active(shape.dropout.step != nullptr) {
    if (!active) return;
    seed = shape.dropout.step->seed;
    step = shape.dropout.step->step;
  }
  KOKKOS_FORCEINLINE_FUNCTION Random4 bits(int query, int key) const {
    return attention_dropout_bits(seed, step, layer, first_row + query, head, key / kColumnsPerMask);
  }
  /// write(k, factor of key + k) for k < count, for one query.
  template <class Write>
  KOKKOS_FORCEINLINE_FUNCTION void for_keys(int query, int key, int count, const Write& write) const {
    for (int k = 0; k < count;) {
      const Random4 random = bits(query, key + k);
      do {
        write(k, dropout_factor(rule, random, (key + k) % kColumnsPerMask));
      } while (++k < count && (key + k) % kColumnsPerMask != 0);
    }
  }
};

/// factors[m][lane], with queries as lanes (the first is `query`) and keys as rows (the first is `key`).
KOKKOS_FORCEINLINE_FUNCTION void form_factors_of_keys(const Team& team, const Dropping& dropping, int query, int key,
                                                      int n_rows, float* factors) {
  for_columns(team, kLanes, [&](int lane) {
    dropping.for_keys(query + lane, key, n_rows, [&](int m, float factor) { factors[m * kLanes + lane] = factor; });
  });
  team.team_barrier();
}

/// Dropout factors of a tile with queries as rows and keys as lanes.
KOKKOS_FORCEINLINE_FUNCTION void form_factors_of_queries(const Team& team, const Dropping& dropping, int query, int key,
                                                         int n_rows, float* factors) {
  for_columns(team, n_rows, [&](int m) {
    dropping.for_keys(query + m, key, kLanes, [&](int lane, float factor) { factors[m * kLanes + lane] = factor; });
  });
  team.team_barrier();
}

/// panel[m][lane] *= factors[m][lane].
KOKKOS_FORCEINLINE_FUNCTION void multiply_panel(const Team& team, int n_rows, const float* factors, float* panel) {
  for_panel(team, n_rows, [&](int m, int lane) { panel[m * kLanes + lane] *= factors[m * kLanes + lane]; });
}

/// Scratch of the forward pass.
struct ForwardPieces {
  float *queries, *sums, *keys, *values, *scores, *factors, *buffer, *largest, *total, *next, *correction;

  KOKKOS_FORCEINLINE_FUNCTION ForwardPieces(Pieces& pieces, int head_size)
      : queries(pieces.take(kBlockRows * head_size)),
        sums(pieces.take(kBlockRows * head_size)),
        keys(pieces.take(kTileRows * head_size)),
        values(pieces.take(kTileRows * head_size)),
        scores(pieces.take(kTileRows * kLanes)),
        factors(pieces.take(kTileRows * kLanes)),
        buffer(pieces.take(head_size)),
        largest(pieces.take(kBlockRows)),
        total(pieces.take(kBlockRows)),
        next(pieces.take(kLanes)),
        correction(pieces.take(kLanes)) {}
};

/// scores[m][lane] = products of a tile with a panel; capped if softcap > 0.
KOKKOS_FORCEINLINE_FUNCTION void form_scores(const Team& team, const Live& rows, int head_size, float softcap,
                                             const float* tile, const float* panel, float* scores) {
  product<false>(team, rows.end - rows.begin, head_size, {tile + rows.begin * head_size, head_size, 1}, panel, scores);
  if (softcap > 0)
    for_panel(team, rows.end - rows.begin, [&](int m, int lane) {
      float& score = scores[m * kLanes + lane];
      score = capped_score(score, softcap);
    });
}

/// Scratch of a pass of the backward pass: two panels of inputs and up to two of sums per block, two tiles.
struct BackwardPieces {
  float *panels[2], *sums[2], *tiles[2], *scores, *slopes, *factors, *buffer, *log_sum, *delta;

  KOKKOS_FORCEINLINE_FUNCTION BackwardPieces(Pieces& pieces, int head_size, int n_sums) {
    for (float*& panel : panels) panel = pieces.take(kBlockRows * head_size);
    for (int i = 0; i < n_sums; ++i) sums[i] = pieces.take(kBlockRows * head_size);
    for (float*& tile : tiles) tile = pieces.take(kTileRows * head_size);
    scores = pieces.take(kTileRows * kLanes);
    slopes = pieces.take(kTileRows * kLanes);
    factors = pieces.take(kTileRows * kLanes);
    buffer = pieces.take(2 * head_size);
    log_sum = pieces.take(most(kBlockRows, kTileRows));
    delta = pieces.take(most(kBlockRows, kTileRows));
  }
};

struct BackwardArguments {
  Attention shape;
  AnyMatrix queries, keys, values, out, out_gradient, dq, dk, dv;
  const float* log_sum;
  float* delta;  ///< out . out_gradient of each row: [sequences, heads, length], like log_sum
  DropoutRule dropout;
};

/// scores = probabilities, slopes = gradient of the scores before the cap, from scores and from the gradients of the
/// probabilities in `slopes`. Row m, lane l: log_sum(m, l), delta(m, l); visible(m, l).
template <class LogSum, class Delta, class Visible>
KOKKOS_FORCEINLINE_FUNCTION void form_slopes(const Team& team, int n_rows, float softcap, bool masked, float* scores,
                                             float* slopes, const LogSum& log_sum, const Delta& delta,
                                             const Visible& visible) {
  const float inverse = softcap > 0 ? 1.0f / softcap : 0.0f;  // without a cap, its derivative is 1
  for_panel(team, n_rows, [&](int m, int lane) {
    const int e = m * kLanes + lane;
    const float capped = scores[e] * inverse;
    scores[e] = exponential(scores[e] - log_sum(m, lane));
    slopes[e] = scores[e] * (slopes[e] - delta(m, lane)) * (1.0f - capped * capped);
  });
  if (masked)
    for_panel(team, n_rows, [&](int m, int lane) {
      const int e = m * kLanes + lane;
      const bool seen = visible(m, lane);
      scores[e] = seen ? scores[e] : 0.0f;
      slopes[e] = seen ? slopes[e] : 0.0f;
    });
}

/// Forms dq of each block of queries, from the keys that it reads, and delta.
void queries_backward(const Execution& execution, const BackwardArguments& a) {
  const int head_size = static_cast<int>(a.shape.head_size);
  Pieces measure(nullptr);
  BackwardPieces(measure, head_size, 1);
  const std::size_t bytes = measure.bytes();
  for_teams(
      execution, "attention: dq", a.shape.sequences * a.shape.heads * blocks_of(a.shape), bytes,
      KOKKOS_LAMBDA(const Team& team) {
        const Attention& shape = a.shape;
        const Block block = block_of(shape, shape.heads, team.league_rank(), true);
        const std::int64_t column = block.head * head_size;
        const std::int64_t key_column = block.head / (shape.heads / shape.kv_heads) * head_size;
        const std::int64_t statistics = (block.sequence * shape.heads + block.head) * shape.length + block.begin;
        Pieces pieces(team.team_scratch(scratch_level()).get_shmem_aligned(bytes, 64));
        const BackwardPieces s(pieces, head_size, 1);
        load_panels(team, block, a.queries, column, head_size, shape.scale, s.buffer, s.panels[0]);
        load_panels(team, block, a.out_gradient, column, head_size, 1.0f, s.buffer, s.panels[1]);
        for_columns(team, kBlockRows * head_size, [&](int i) { s.sums[0][i] = 0.0f; });
        const int rows = block.end() - block.begin;
        for (int m = 0; m < rows; ++m) {
          const std::int64_t row = block.first_row + block.begin + m;
          const float* o = row_chunk(team, a.out, row, column, head_size, s.buffer);
          const float* g = row_chunk(team, a.out_gradient, row, column, head_size, s.buffer + head_size);
          const float delta = sum_columns<float>(team, head_size, [&](int c) { return o[c] * g[c]; });
          once(team, [&] { s.delta[m] = a.delta[statistics + m] = delta; });
        }
        for_columns(team, kBlockRows, [&](int m) {
          s.log_sum[m] = m < rows ? a.log_sum[statistics + m] : 0.0f;
          if (m >= rows) s.delta[m] = 0.0f;
        });
        team.team_barrier();

        const KeptBlocks kept = kept_of(shape, block.sequence, block.head);
        const Dropping dropping(shape, a.dropout, block, block.head);
        for (int tile = first_tile(block); tile < block.end(); tile += kTileRows) {
          if (!kept(block.begin, tile)) continue;
          const int count = least(kTileRows, block.end() - tile);
          load_tile(team, a.keys, block.first_row + tile, count, key_column, head_size, 1.0f, s.buffer, s.tiles[0]);
          load_tile(team, a.values, block.first_row + tile, count, key_column, head_size, 1.0f, s.buffer, s.tiles[1]);
          for (int group = 0; group < block.groups(); ++group) {
            const LaneMask mask(block, group);
            const Live live = mask.live(tile, count);
            if (live.begin >= live.end) continue;
            const int n_rows = live.end - live.begin;
            const std::int64_t panel = std::int64_t{group} * kLanes * head_size;
            form_scores(team, live, head_size, shape.softcap, s.tiles[0], s.panels[0] + panel, s.scores);
            product<false>(team, n_rows, head_size, {s.tiles[1] + live.begin * head_size, head_size, 1},
                           s.panels[1] + panel, s.slopes);
            if (dropping.active) {
              form_factors_of_keys(team, dropping, block.row(group, 0), tile + live.begin, n_rows, s.factors);
              multiply_panel(team, n_rows, s.factors, s.slopes);
            }
            const float* log_sum = s.log_sum + group * kLanes;
            const float* delta = s.delta + group * kLanes;
            form_slopes(
                team, n_rows, shape.softcap, live.masked, s.scores, s.slopes,
                [=](int, int lane) { return log_sum[lane]; }, [=](int, int lane) { return delta[lane]; },
                [&](int m, int lane) { return mask.reads(tile + live.begin + m, lane); });
            product<true>(team, head_size, n_rows, {s.tiles[0] + live.begin * head_size, 1, head_size}, s.slopes,
                          s.sums[0] + panel);
          }
        }
        store_panels(
            team, block, s.sums[0], [&](int) { return shape.scale; }, a.dq, column, head_size);
      });
}

/// Forms dk and dv of each block of keys, from the queries that read it, of all heads that share it.
void keys_backward(const Execution& execution, const BackwardArguments& a) {
  const int head_size = static_cast<int>(a.shape.head_size);
  Pieces measure(nullptr);
  BackwardPieces(measure, head_size, 2);
  const std::size_t bytes = measure.bytes();
  for_teams(
      execution, "attention: dk, dv", a.shape.sequences * a.shape.kv_heads * blocks_of(a.shape), bytes,
      KOKKOS_LAMBDA(const Team& team) {
        const Attention& shape = a.shape;
        const Block block = block_of(shape, shape.kv_heads, team.league_rank(), false);
        const std::int64_t key_column = block.head * head_size;
        const std::int64_t sharing = shape.heads / shape.kv_heads;
        Pieces pieces(team.team_scratch(scratch_level()).get_shmem_aligned(bytes, 64));
        const BackwardPieces s(pieces, head_size, 2);
        load_panels(team, block, a.keys, key_column, head_size, 1.0f, s.buffer, s.panels[0]);
        load_panels(team, block, a.values, key_column, head_size, 1.0f, s.buffer, s.panels[1]);
        for_columns(team, kBlockRows * head_size, [&](int i) { s.sums[0][i] = s.sums[1][i] = 0.0f; });
        const int end = last_reader(block) + 1;

        for (std::int64_t head = block.head * sharing; head < (block.head + 1) * sharing; ++head) {
          const std::int64_t column = head * head_size;
          const std::int64_t statistics = (block.sequence * shape.heads + head) * shape.length;
          const KeptBlocks kept = kept_of(shape, block.sequence, head);
          const Dropping dropping(shape, a.dropout, block, head);
          for (int tile = block.begin / kTileRows * kTileRows; tile < end; tile += kTileRows) {
            if (!kept(tile, block.begin)) continue;
            const int count = least(kTileRows, end - tile);
            const RowMask mask(block, tile, count);
            if (mask.least_lower >= block.end()) continue;
            load_tile(team, a.queries, block.first_row + tile, count, column, head_size, shape.scale, s.buffer,
                      s.tiles[0]);
            load_tile(team, a.out_gradient, block.first_row + tile, count, column, head_size, 1.0f, s.buffer,
                      s.tiles[1]);
            for_columns(team, kTileRows, [&](int m) {
              s.log_sum[m] = m < count ? a.log_sum[statistics + tile + m] : 0.0f;
              s.delta[m] = m < count ? a.delta[statistics + tile + m] : 0.0f;
            });
            for (int group = 0; group < block.groups(); ++group) {
              const int first_key = block.row(group, 0);
              const Live live = mask.live(first_key, least(first_key + kLanes, block.end()) - 1);
              if (live.begin >= live.end) continue;
              const int n_rows = live.end - live.begin;
              const std::int64_t panel = std::int64_t{group} * kLanes * head_size;
              const int first = live.begin * head_size;
              form_scores(team, live, head_size, shape.softcap, s.tiles[0], s.panels[0] + panel, s.scores);
              product<false>(team, n_rows, head_size, {s.tiles[1] + first, head_size, 1}, s.panels[1] + panel,
                             s.slopes);
              if (dropping.active) {
                form_factors_of_queries(team, dropping, tile + live.begin, first_key, n_rows, s.factors);
                multiply_panel(team, n_rows, s.factors, s.slopes);
              }
              const float* log_sum = s.log_sum + live.begin;
              const float* delta = s.delta + live.begin;
              form_slopes(
                  team, n_rows, shape.softcap, live.masked, s.scores, s.slopes, [=](int m, int) { return log_sum[m]; },
                  [=](int m, int) { return delta[m]; },
                  [&](int m, int lane) { return mask.read_by(first_key + lane, live.begin + m); });
              product<true>(team, head_size, n_rows, {s.tiles[0] + first, 1, head_size}, s.slopes, s.sums[0] + panel);
              if (dropping.active) multiply_panel(team, n_rows, s.factors, s.scores);
              product<true>(team, head_size, n_rows, {s.tiles[1] + first, 1, head_size}, s.scores, s.sums[1] + panel);
            }
          }
        }
        store_panels(
            team, block, s.sums[0], [](int) { return 1.0f; }, a.dk, key_column, head_size);
        store_panels(
            team, block, s.sums[1], [](int) { return 1.0f; }, a.dv, key_column, head_size);
      });
}

}  // namespace

void attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte>) {
  const int head_size = static_cast<int>(shape.head_size);
  Pieces measure(nullptr);
  ForwardPieces(measure, head_size);
  const std::size_t bytes = measure.bytes();
  const DropoutRule rule = dropout_rule(shape.dropout.probability);
  for_teams(
      execution, "attention", shape.sequences * shape.heads * blocks_of(shape), bytes, KOKKOS_LAMBDA(const Team& team) {
        constexpr float kNone = -std::numeric_limits<float>::infinity();
        const Block block = block_of(shape, shape.heads, team.league_rank(), true);
        const std::int64_t column = block.head * head_size;
        const std::int64_t key_column = block.head / (shape.heads / shape.kv_heads) * head_size;
        Pieces pieces(team.team_scratch(scratch_level()).get_shmem_aligned(bytes, 64));
        const ForwardPieces s(pieces, head_size);
        load_panels(team, block, queries, column, head_size, shape.scale, s.buffer, s.queries);
        for_columns(team, kBlockRows, [&](int m) {
          s.largest[m] = kNone;
          s.total[m] = 0.0f;
        });
        for_columns(team, kBlockRows * head_size, [&](int i) { s.sums[i] = 0.0f; });

        const KeptBlocks kept = kept_of(shape, block.sequence, block.head);
        const Dropping dropping(shape, rule, block, block.head);
        for (int tile = first_tile(block); tile < block.end(); tile += kTileRows) {
          if (!kept(block.begin, tile)) continue;
          const int count = least(kTileRows, block.end() - tile);
          load_tile(team, keys, block.first_row + tile, count, key_column, head_size, 1.0f, s.buffer, s.keys);
          load_tile(team, values, block.first_row + tile, count, key_column, head_size, 1.0f, s.buffer, s.values);
          for (int group = 0; group < block.groups(); ++group) {
            const LaneMask mask(block, group);
            const Live live = mask.live(tile, count);
            if (live.begin >= live.end) continue;
            const int n_rows = live.end - live.begin;
            const std::int64_t panel = std::int64_t{group} * kLanes * head_size;
            form_scores(team, live, head_size, shape.softcap, s.keys, s.queries + panel, s.scores);
            if (live.masked)
              for_panel(team, n_rows, [&](int m, int lane) {
                float& score = s.scores[m * kLanes + lane];
                score = mask.reads(tile + live.begin + m, lane) ? score : kNone;
              });
            // The largest score so far; what was summed relative to the old one is rescaled.
            float* largest = s.largest + group * kLanes;
            float* total = s.total + group * kLanes;
            for_columns(team, kLanes, [&](int lane) { s.next[lane] = largest[lane]; });
            for_lanes(team, n_rows, s.next, [&](float now, int m, int lane) {
              const float score = s.scores[m * kLanes + lane];
              return score > now ? score : now;
            });
            for_columns(team, kLanes, [&](int lane) {
              const float reference = s.next[lane] == kNone ? 0.0f : s.next[lane];  // no key read yet
              s.correction[lane] = exponential(largest[lane] - reference);
              total[lane] = rounded_product(total[lane], s.correction[lane]);
              largest[lane] = s.next[lane];
              s.next[lane] = reference;
            });
            for_lanes(team, n_rows, total, [&](float now, int m, int lane) {
              float& score = s.scores[m * kLanes + lane];
              score = exponential(score - s.next[lane]);
              return rounded_sum(now, score);
            });
            team.team_barrier();
            if (dropping.active) {
              form_factors_of_keys(team, dropping, block.row(group, 0), tile + live.begin, n_rows, s.factors);
              multiply_panel(team, n_rows, s.factors, s.scores);
            }
            float* sums = s.sums + panel;
            for_panel(team, head_size, [&](int c, int lane) {
              sums[c * kLanes + lane] = rounded_product(sums[c * kLanes + lane], s.correction[lane]);
            });
            product<true>(team, head_size, n_rows, {s.values + live.begin * head_size, 1, head_size}, s.scores, sums);
          }
        }
        team.team_barrier();
        store_panels(
            team, block, s.sums, [&](int m) { return 1.0f / s.total[m]; }, out, column, head_size);
        const std::int64_t statistics = (block.sequence * shape.heads + block.head) * shape.length + block.begin;
        for_columns(team, block.end() - block.begin,
                    [&](int m) { log_sum[statistics + m] = s.largest[m] + Kokkos::log(s.total[m]); });
      });
}

void attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  BackwardArguments arguments{shape,
                              queries,
                              keys,
                              values,
                              out,
                              out_gradient,
                              dq,
                              dk,
                              dv,
                              log_sum.data,
                              reinterpret_cast<float*>(workspace.data),
                              dropout_rule(shape.dropout.probability)};
  queries_backward(execution, arguments);
  keys_backward(execution, arguments);
}

}  // namespace weft::kernels::portable

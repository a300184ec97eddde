// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/rows_portable.hpp"
#include "kernels/language/sample/sample_rule.hpp"

namespace weft::kernels::portable {
namespace {

struct SampleScratch {
  float z[kChunkColumns];
};

/// The largest key from which on the sum of `measure` over keys reaches `needed`. sum_from(key): that sum.
template <class SumFrom>
KOKKOS_FORCEINLINE_FUNCTION std::uint32_t threshold(std::uint64_t needed, const SumFrom& sum_from) {
  std::uint32_t key = 0;
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit /= 2)
    if (sum_from(key | bit) >= needed) key |= bit;
  return key;
}

/// The distribution of a row: its weights, and which logits are kept.
struct KeptRow {
  LogitWeight weight{}, plain{};  ///< at the temperature of the rule, and at 1
  KeptLogits kept{};
  std::uint64_t total = 0, all = 0;  ///< weights of the kept logits; plain weights of all
  bool finite = false;
};

/// each_chunk(body): calls body(column, count, logits) for the chunks of the row.
template <class EachChunk>
KOKKOS_FORCEINLINE_FUNCTION KeptRow kept_of_row(const Team& team, const SampleRule& r, const EachChunk& each_chunk) {
  const auto sum = [&](auto&& term) {
    std::uint64_t total = 0;
    each_chunk([&](std::int64_t, int count, const float* z) {
      total += sum_columns<std::uint64_t>(team, count, [&](int c) { return term(z[c]); });
    });
    return total;
  };
  KeptRow row;
  // The largest logit; NaN if there is one.
  float most = bits_float(0xff800000u);
  each_chunk([&](std::int64_t, int count, const float* z) {
    most = max_columns(team, count, most, [&](int c) { return z[c]; });
  });
  row.finite = is_finite_key(logit_key(most)) && sum([](float z) -> std::uint64_t { return z != z ? 1 : 0; }) == 0;
  if (!row.finite) return row;
  LogitWeight weight{0.0f, 1.0f / r.temperature, r.softcap};
  weight.largest = weight.capped(most);
  row.weight = row.plain = weight;
  row.plain.inverse_temperature = 1.0f;

  row.all = sum(row.plain);
  std::uint64_t total = r.temperature == 1.0f ? row.all : sum(weight);
  KeptLogits kept;
  if (r.top_k > 0) {
    const auto count_from = [&](std::uint32_t key) {
      return sum([&](float z) -> std::uint64_t { return logit_key(z) >= key ? 1 : 0; });
    };
    kept.key = threshold(static_cast<std::uint64_t>(r.top_k), count_from);
    kept.ties = r.top_k - static_cast<std::int64_t>(count_from(kept.key + 1));
  }
  const auto weight_from = [&](std::uint32_t key) {
    return sum([&](float z) -> std::uint64_t { return logit_key(z) >= key ? weight(z) : 0; });
  };
  if (r.top_k > 0)
    total = weight_from(kept.key + 1) + static_cast<std::uint64_t>(kept.ties) * weight(logit_of_key(kept.key));
  if (r.top_p < 1) {
    const std::uint64_t needed = needed_weight(r.top_p, total);
    const std::uint32_t lowest = kept.key;
    const std::uint32_t key =
        threshold(needed, [&](std::uint32_t from) { return from <= lowest ? total : weight_from(from); });
    const std::uint64_t above = weight_from(key + 1), each = weight(logit_of_key(key));
    const std::int64_t equal =
        r.top_k > 0 && key == lowest
            ? kept.ties
            : static_cast<std::int64_t>(sum([&](float z) -> std::uint64_t { return logit_key(z) == key; }));
    kept = {key, needed_ties(needed, above, each, equal)};
    total = above + static_cast<std::uint64_t>(kept.ties) * each;
  }
  row.kept = kept;
  row.total = total;
  return row;
}

}  // namespace

void mask_others(const Execution& execution, const SampleRule& rule, AnyMatrix logits,
                 Array<const std::int32_t> targets) {
  const SampleRule r = rule;
  for_rows<SampleScratch>(
      execution, "mask_others", logits.rows, KOKKOS_LAMBDA(const Team& team, SampleScratch& buffer, std::int64_t row) {
        if (targets[row] == kIgnored) return;
        const auto each_chunk = [&](auto&& body) {
          for_chunks(r.vocabulary, r.vocabulary, [&](std::int64_t column, int count) {
            body(column, count, row_chunk(team, logits, row, column, count, buffer.z));
          });
        };
        const KeptRow of_row = kept_of_row(team, r, each_chunk);
        if (!of_row.finite) return;
        const KeptLogits kept = of_row.kept;
        std::int64_t ties = 0;  // among the chunks before
        each_chunk([&](std::int64_t column, int count, const float* z) {
          // The last id of this chunk that is kept among those of the limit.
          int last = -1;
          for (int c = 0; c < count; ++c)
            if (logit_key(z[c]) == kept.key && ties++ < kept.ties) last = c;
          team.team_barrier();
          store_chunk(team, logits, row, column, count, [&](int c) {
            const std::uint32_t key = logit_key(z[c]);
            const bool stays = key > kept.key || (key == kept.key && c <= last) || column + c == targets[row];
            return stays ? z[c] : bits_float(0xff800000u);
          });
          team.team_barrier();
        });
      });
}

void sample_kept(const Execution& execution, const SampleRule& rule, AnyMatrix logits,
                 const GrowingSequences& sequences) {
  const SampleRule r = rule;
  const GrowingSequences s = sequences;
  for_rows<SampleScratch>(
      execution, "sample", logits.rows, KOKKOS_LAMBDA(const Team& team, SampleScratch& buffer, std::int64_t row) {
        const CachedSequence sequence = s.sequences[row];
        const std::int32_t position = s.positions[row];
        if (position >= sequence.end) return;
        const auto each_chunk = [&](auto&& body) {
          for_chunks(r.vocabulary, r.vocabulary, [&](std::int64_t column, int count) {
            body(column, count, row_chunk(team, logits, row, column, count, buffer.z));
          });
        };
        const KeptRow of_row = kept_of_row(team, r, each_chunk);
        if (!of_row.finite) {
          once(team, [&] {
            const float nan = bits_float(0x7fc00000u);
            s.drawn(row, position - sequence.prefix) = {0, nan, nan};
            s.ids[row] = 0;
            s.positions[row] = position + 1;
          });
          return;
        }
        const LogitWeight weight = of_row.weight, plain = of_row.plain;
        const KeptLogits kept = of_row.kept;
        const std::uint64_t total = of_row.total, all = of_row.all;

        // Inversion: the first token with which the sum of weights exceeds the draw.
        const std::uint64_t target = uniform_below(sample_bits(s.streams[row], position + 1), total);
        const std::uint64_t tie_weight = kept.key == 0 ? 0 : weight(logit_of_key(kept.key));
        std::uint64_t before = 0;
        std::int64_t ties = 0, token = -1;
        each_chunk([&](std::int64_t column, int count, const float* z) {
          if (token >= 0) return;
          const auto present = static_cast<std::int64_t>(sum_columns<std::uint64_t>(
              team, count, [&](int c) -> std::uint64_t { return logit_key(z[c]) == kept.key ? 1 : 0; }));
          const std::int64_t left = kept.ties - ties, taken = present < left ? present : left;
          const std::uint64_t here =
              sum_columns<std::uint64_t>(
                  team, count, [&](int c) -> std::uint64_t { return logit_key(z[c]) > kept.key ? weight(z[c]) : 0; }) +
              static_cast<std::uint64_t>(taken) * tie_weight;
          if (before + here <= target) {
            before += here;
            ties += taken;
            return;
          }
          team.team_barrier();
          for (int c = 0; c < count && token < 0; ++c) {
            const std::uint32_t key = logit_key(z[c]);
            if (key < kept.key || (key == kept.key && ties++ >= kept.ties)) continue;
            before += weight(z[c]);
            if (before > target) {
              token = column + c;
              once(team, [&] {
                s.drawn(row, position - sequence.prefix) = {
                    static_cast<std::uint32_t>(token),
                    static_cast<float>(static_cast<double>(plain.capped(z[c]) - plain.largest) -
                                       log(static_cast<double>(all) * 0x1p-40)),
                    static_cast<float>(log(static_cast<double>(weight(z[c])) / static_cast<double>(total)))};
                s.ids[row] = static_cast<std::uint32_t>(token);
                s.positions[row] = position + 1;
              });
            }
          }
          team.team_barrier();
        });
      });
}

void sum_blocks(const Execution& execution, const BlockRule& rule, AnyMatrix logits, Matrix<BlockSum> sums) {
  static_assert(kChunkColumns % kDrawBlock == 0);
  const BlockRule r = rule;
  for_rows<SampleScratch>(
      execution, "sum_blocks", logits.rows, KOKKOS_LAMBDA(const Team& team, SampleScratch& buffer, std::int64_t row) {
        for_chunks(r.vocabulary, r.vocabulary, [&](std::int64_t column, int count) {
          const float* const chunk = row_chunk(team, logits, row, column, count, buffer.z);
          for (int begin = 0; begin < count; begin += kDrawBlock) {
            const float* const z = chunk + begin;
            const int ids = static_cast<int>(smaller(kDrawBlock, count - begin));
            const float minus_infinity = bits_float(0xff800000u);
            const bool is_nan =
                sum_columns<std::uint64_t>(team, ids, [&](int c) -> std::uint64_t { return z[c] != z[c]; }) > 0;
            const float largest = max_columns(team, ids, minus_infinity, [&](int c) { return z[c]; });
            const auto sum = [&](float scale) -> std::uint32_t {
              if (!(largest > minus_infinity)) return 0;
              const PowerWeight weight(scale, capped_logit(largest, r.softcap));
              return sum_columns<std::uint32_t>(team, ids,
                                                [&](int c) { return weight(capped_logit(z[c], r.softcap)); });
            };
            const std::uint32_t plain = sum(BlockRule::kPlainScale),
                                weight = r.scale == BlockRule::kPlainScale ? plain : sum(r.scale);
            once(team, [&] {
              sums(row, (column + begin) / kDrawBlock) = {weight, plain, is_nan ? bits_float(0x7fc00000u) : largest};
            });
          }
        });
      });
}

void sample_by_blocks(const Execution& execution, const BlockRule& rule, AnyMatrix logits, Matrix<BlockSum> sums,
                      const GrowingSequences& sequences) {
  const GrowingSequences s = sequences;
  const BlockRule r = rule;
  for_rows<SampleScratch>(
      execution, "sample_by_blocks", logits.rows,
      KOKKOS_LAMBDA(const Team& team, SampleScratch& buffer, std::int64_t row) {
        const CachedSequence sequence = s.sequences[row];
        const std::int32_t position = s.positions[row];
        if (position >= sequence.end) return;
        std::uint32_t most = 0;
        for (std::int64_t b = 0; b < sums.columns; ++b) {
          const std::uint32_t key = logit_key(sums(row, b).largest);
          most = key > most ? key : most;
        }
        const float nan = bits_float(0x7fc00000u);
        Drawn drawn{0, nan, nan};
        if (const BlockDraw draw(r, most); draw.is_finite()) {
          std::uint64_t total = 0, all = 0;
          for (std::int64_t b = 0; b < sums.columns; ++b) {
            total += draw.weight_of(sums(row, b));
            all += draw.plain_of(sums(row, b));
          }
          // The first block, and in it the first id, with which the sum of weights exceeds the target.
          const Random4 random = sample_bits(s.streams[row], position + 1);
          std::uint64_t rest = draw.target(random, total);
          std::int64_t b = 0;
          for (std::uint64_t here; (here = draw.weight_of(sums(row, b))) <= rest; ++b) rest -= here;
          const BlockSum block = sums(row, b);
          std::uint32_t rest_in = draw.target_in(block, random, rest);
          const std::int64_t first = b * kDrawBlock;
          const float* const z = row_chunk(team, logits, row, first,
                                           static_cast<int>(smaller(kDrawBlock, r.vocabulary - first)), buffer.z);
          team.team_barrier();
          int i = 0;
          for (std::uint32_t here; (here = draw.weight_in(block, z[i])) <= rest_in; ++i) rest_in -= here;
          drawn = draw.drawn(static_cast<std::uint32_t>(first + i), z[i], total, all);
          team.team_barrier();
        }
        once(team, [&] {
          s.drawn(row, position - sequence.prefix) = drawn;
          s.ids[row] = drawn.token;
          s.positions[row] = position + 1;
        });
      });
}

}  // namespace weft::kernels::portable

namespace weft::kernels {

void note_losses(const Execution& execution, const GrowingSequences& sequences, Array<const std::int32_t> drawn_at,
                 Array<const float> losses) {
  const GrowingSequences s = sequences;
  for_all(
      execution, "note_losses", losses.size, KOKKOS_LAMBDA(std::int64_t row) {
        const CachedSequence sequence = s.sequences[row];
        const std::int32_t position = drawn_at[row];
        if (position < sequence.end) s.drawn(row, position - sequence.prefix).log_drawn = -losses[row];
      });
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Attention of one row of one head to keys that are read one by one, by one team: shared by the portable kernels of
// attention to a cache (decode/) and to a text (text_attention.hpp). Every operation and its order are those of
// attention_portable.cpp for the same row, so that in fp32 both have the same bits: a score is one chain of
// multiply_add over the columns, the largest score so far changes once per kKeyTile keys, and both sums are chains over
// the keys.
#pragma once

#include "kernels/language/attention/attention_shape.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {

#if defined(KOKKOS_ENABLE_CUDA)
constexpr int kKeyTile = 4;
constexpr int kKeysAtOnce = 16;
#else
constexpr int kKeyTile = 64;
constexpr int kKeysAtOnce = 8;
#endif
/// Keys whose scores are in scratch together. Blocks begin at multiples of this key.
constexpr int kKeysTogether = 64;
static_assert(kKeysTogether % kKeyTile == 0 && kKeysTogether % kKeysAtOnce == 0);

struct AttendScratch {
  float query[kLargestHead], sum[kLargestHead];
  float row[kKeysAtOnce][kLargestHead];
  float score[kKeysTogether];
};
static_assert(kLargestHead <= kChunkColumns);

/// The score with a soft cap > 0.
KOKKOS_FORCEINLINE_FUNCTION float capped_score(float score, float softcap) {
  return rounded_product(softcap, hyperbolic_tangent(rounded_product(score, 1.0f / softcap)));
}

/// scratch.query[c] = scale * query[c].
KOKKOS_FORCEINLINE_FUNCTION void load_query(const Team& team, AttendScratch& scratch, const AnyMatrix& queries,
                                            std::int64_t row, std::int64_t column, int size, float scale) {
  const float* query = row_chunk(team, queries, row, column, size, scratch.query);
  for_columns(team, size, [&](int c) { scratch.query[c] = scale * query[c]; });
}

/// Forms sum[c] = sum over keys j in [lower, end) of exp(s_j - m) v_j[c] in the scratch, m the largest score, and
/// returns the sum of exp(s_j - m): its inverse times the former is the output. lower < end. s_j: product of
/// scratch.query (load_query) and key j, capped if softcap > 0. key(j, buffer), value(j, buffer): pointers to `size`
/// numbers, which may be in the buffer.
template <class Key, class Value>
KOKKOS_FORCEINLINE_FUNCTION float attend(const Team& team, AttendScratch& scratch, int size, std::int32_t lower,
                                         std::int32_t end, float softcap, const Key& key, const Value& value) {
  const float none = bits_float(0xff800000u);
  float largest = none, total = 0.0f;
  for_columns(team, size, [&](int c) { scratch.sum[c] = 0.0f; });
  for (std::int32_t block = lower / kKeysTogether * kKeysTogether; block < end; block += kKeysTogether) {
    const std::int32_t first = block > lower ? block : lower,
                       last = block + kKeysTogether < end ? block + kKeysTogether : end;
    for (std::int32_t j = first; j < last; j += kKeysAtOnce) {
      const int count = smaller(kKeysAtOnce, last - j);
      const float* keys[kKeysAtOnce];
      for (int i = 0; i < kKeysAtOnce; ++i) keys[i] = i < count ? key(j + i, scratch.row[i]) : keys[0];
      team.team_barrier();
#ifdef KOKKOS_ENABLE_CUDA
      for_columns(team, count, [&](int i) {
        float score = 0.0f;
        for (int c = 0; c < size; ++c) score = multiply_add(keys[i][c], scratch.query[c], score);
        scratch.score[j - block + i] = softcap > 0 ? capped_score(score, softcap) : score;
      });
#else
      float score[kKeysAtOnce] = {};
      for (int c = 0; c < size; ++c)
        for (int i = 0; i < kKeysAtOnce; ++i) score[i] = multiply_add(keys[i][c], scratch.query[c], score[i]);
      for (int i = 0; i < count; ++i)
        scratch.score[j - block + i] = softcap > 0 ? capped_score(score[i], softcap) : score[i];
#endif
      team.team_barrier();
    }
    for (std::int32_t tile = first / kKeyTile * kKeyTile; tile < last; tile += kKeyTile) {
      const std::int32_t from = tile > first ? tile : first, to = tile + kKeyTile < last ? tile + kKeyTile : last;
      float most = largest;
      for (std::int32_t j = from; j < to; ++j) most = scratch.score[j - block] > most ? scratch.score[j - block] : most;
      const float reference = most == none ? 0.0f : most, correction = exponential(largest - reference);
      largest = most;
      total = rounded_product(total, correction);
      for_columns(team, size, [&](int c) { scratch.sum[c] = rounded_product(scratch.sum[c], correction); });
      for (std::int32_t j = from; j < to; ++j) {
        const float probability = exponential(scratch.score[j - block] - reference);
        total = rounded_sum(total, probability);
        const float* v = value(j, scratch.row[0]);
        for_columns(team, size, [&](int c) { scratch.sum[c] = multiply_add(v[c], probability, scratch.sum[c]); });
      }
    }
    team.team_barrier();
  }
  return total;
}

}  // namespace weft::kernels

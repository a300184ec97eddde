// SPDX-License-Identifier: Apache-2.0
//
// Attention of one row of one head to keys that are read one by one, by one team: shared by the portable kernels of
// attention to a cache (decode/) and to a text (text_attention.hpp).
#pragma once

#include "kernels/language/attention/attention_shape.hpp"
#include "kernels/language/exponential.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels {

/// Keys whose probabilities are formed together. Blocks begin at multiples of this key.
constexpr int kKeysTogether = 64;

struct AttendScratch {
  float query[kLargestHead], row[kLargestHead], sum[kLargestHead];
  float score[kKeysTogether];
};
static_assert(kLargestHead <= kChunkColumns);

/// Forms sum[c] = sum over keys j in [lower, end) of exp(s_j - m) v_j[c] in the scratch, m the largest score, and
/// returns the sum of exp(s_j - m): their quotient is the output. lower < end. score(product of query and key): s_j;
/// key(j), value(j): pointers to `size` numbers, which may be in scratch.row.
template <class Score, class Key, class Value>
KOKKOS_FORCEINLINE_FUNCTION float attend(const Team& team, AttendScratch& scratch, int size, const float* query,
                                         std::int32_t lower, std::int32_t end, const Score& score, const Key& key,
                                         const Value& value) {
  float largest = bits_float(0xff800000u), total = 0.0f;
  for_columns(team, size, [&](int c) { scratch.sum[c] = 0.0f; });
  for (std::int32_t block = lower / kKeysTogether * kKeysTogether; block < end; block += kKeysTogether) {
    const std::int32_t first = block > lower ? block : lower,
                       last = block + kKeysTogether < end ? block + kKeysTogether : end;
    float most = largest;
    for (std::int32_t j = first; j < last; ++j) {
      const float* k = key(j);
      const float s = score(sum_columns<float>(team, size, [&](int c) { return query[c] * k[c]; }));
      once(team, [&] { scratch.score[j - first] = s; });
      most = s > most ? s : most;
    }
    team.team_barrier();
    const float factor = exponential(largest - most);
    largest = most;
    total *= factor;
    for_columns(team, size, [&](int c) { scratch.sum[c] *= factor; });
    for (std::int32_t j = first; j < last; ++j) {
      const float probability = exponential(scratch.score[j - first] - largest);
      total += probability;
      const float* v = value(j);
      for_columns(team, size, [&](int c) { scratch.sum[c] += probability * v[c]; });
    }
    team.team_barrier();
  }
  return total;
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/exponential.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/head/softmax_part.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels::portable {
namespace {

struct HeadScratch {
  float z[kChunkColumns];
};

WEFT_HOST_DEVICE inline float capped(float a, float softcap) {
  return softcap == 0.0f ? a : softcap * hyperbolic_tangent(a / softcap);
}
/// The derivative of `capped` from its value.
WEFT_HOST_DEVICE inline float cap_slope(float z, float softcap) { return 1.0f - (z / softcap) * (z / softcap); }

/// The logits of a row as the softmax sees them, by chunks.
struct RowReader {
  const Team& team;
  const CrossEntropy& options;
  const AnyMatrix& logits;
  std::int64_t row;
  float* buffer;

  KOKKOS_FORCEINLINE_FUNCTION const float* operator()(std::int64_t column, int count) const {
    const float* z = row_chunk(team, logits, row, column, count, buffer);
    if (options.softcap == 0.0f && options.temperature == 1.0f) return z;
    const float inverse_temperature = 1.0f / options.temperature;
    for_columns(team, count, [&](int c) { buffer[c] = inverse_temperature * capped(z[c], options.softcap); });
    return buffer;
  }
};

/// target: column of the target's logit; outside [0, vocabulary): another rank has it.
KOKKOS_FORCEINLINE_FUNCTION SoftmaxPart part_of_row(const Team& team, const CrossEntropy& o, const RowReader& read,
                                                    std::int64_t target) {
  SoftmaxPart part{-bits_float(0x7f800000u), 0.0f, 0.0f};
  for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
    const float* z = read(column, count);
    part.largest = max_columns(team, count, part.largest, [&](int c) { return z[c]; });
  });
  for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
    const float* z = read(column, count);
    part.sum += sum_columns<float>(team, count, [&](int c) { return exponential(z[c] - part.largest); });
    // Read here by summation, on every lane: the row is overwritten later.
    if (target >= column && target < column + count)
      part.target_logit = sum_columns<float>(team, count, [&](int c) { return column + c == target ? z[c] : 0.0f; });
  });
  return part;
}

}  // namespace

void softmax_parts(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<SoftmaxPart> parts) {
  const CrossEntropy o = options;
  for_rows<HeadScratch>(
      execution, "softmax_parts", logits.rows, KOKKOS_LAMBDA(const Team& team, HeadScratch& scratch, std::int64_t row) {
        SoftmaxPart part;
        if (targets[row] != kIgnored)
          part = part_of_row(team, o, RowReader{team, o, logits, row, scratch.z}, targets[row] - o.first_token);
        once(team, [&] { parts[row] = part; });
      });
}

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  const CrossEntropy o = options;
  for_rows<HeadScratch>(
      execution, "cross_entropy", logits.rows, KOKKOS_LAMBDA(const Team& team, HeadScratch& scratch, std::int64_t row) {
        if (targets[row] == kIgnored) {
          if (gradient)
            for_chunks(logits.columns, logits.columns, [&](std::int64_t column, int count) {
              store_chunk(team, logits, row, column, count, [](int) { return 0.0f; });
            });
          once(team, [&] { losses[row] = 0.0f; });
          return;
        }
        const std::int64_t target = targets[row] - o.first_token;
        const RowReader read{team, o, logits, row, scratch.z};
        const SoftmaxPart all =
            o.parts.size > 0 ? joined_parts(o.parts, row, logits.rows) : part_of_row(team, o, read, target);
        const float largest = all.largest, log_sum = logf(all.sum);  // of exp(z - largest)
        const float lse = largest + log_sum;
        once(team, [&] { losses[row] = (largest - all.target_logit) + log_sum + o.z_loss * lse * lse; });
        if (!gradient) return;
        const float factor = *o.scale * (o.weights.data == nullptr ? 1.0f : o.weights[row]) * (1.0f / o.temperature);
        const float probability = (1.0f + 2.0f * o.z_loss * lse) / all.sum;
        for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
          const float* z = read(column, count);
          const int here = static_cast<int>(target >= column && target < column + count ? target - column : -1);
          const auto dz = [&](int c) {
            return factor * (exponential(z[c] - largest) * probability - (c == here ? 1.0f : 0.0f));
          };
          if (o.softcap == 0.0f)
            store_chunk(team, logits, row, column, count, dz);
          else
            store_chunk(team, logits, row, column, count,
                        [&](int c) { return dz(c) * cap_slope(z[c] * o.temperature, o.softcap); });
        });
        for (std::int64_t column = o.vocabulary; column < logits.columns; column += kChunkColumns)
          store_chunk(team, logits, row, column, smaller(kChunkColumns, logits.columns - column),
                      [](int) { return 0.0f; });
      });
}

}  // namespace weft::kernels::portable

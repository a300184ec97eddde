// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/exponential.hpp"
#include "kernels/language/head/cross_entropy.hpp"
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

}  // namespace

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  const CrossEntropy o = options;
  for_rows<HeadScratch>(
      execution, "cross_entropy", logits.rows, KOKKOS_LAMBDA(const Team& team, HeadScratch& scratch, std::int64_t row) {
        float* buffer = scratch.z;
        const std::int64_t target = targets[row];
        if (target == kIgnored) {
          if (gradient)
            for_chunks(logits.columns, logits.columns, [&](std::int64_t column, int count) {
              store_chunk(team, logits, row, column, count, [](int) { return 0.0f; });
            });
          once(team, [&] { losses[row] = 0.0f; });
          return;
        }
        const float inverse_temperature = 1.0f / o.temperature;
        const bool transformed = o.softcap != 0.0f || o.temperature != 1.0f;
        const auto read = [&](std::int64_t column, int count) -> const float* {
          const float* z = row_chunk(team, logits, row, column, count, buffer);
          if (!transformed) return z;
          for_columns(team, count, [&](int c) { buffer[c] = inverse_temperature * capped(z[c], o.softcap); });
          return buffer;
        };
        const float infinity = bits_float(0x7f800000u);
        float largest = -infinity;
        for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
          const float* z = read(column, count);
          largest = max_columns(team, count, largest, [&](int c) { return z[c]; });
        });
        float sum = 0.0f, target_logit = 0.0f;
        for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
          const float* z = read(column, count);
          sum += sum_columns<float>(team, count, [&](int c) { return exponential(z[c] - largest); });
          // Read here by summation, on every lane: the row is overwritten below.
          if (target >= column && target < column + count)
            target_logit = sum_columns<float>(team, count, [&](int c) { return column + c == target ? z[c] : 0.0f; });
        });
        const float log_sum = logf(sum);  // of exp(z - largest)
        const float lse = largest + log_sum;
        once(team, [&] { losses[row] = (largest - target_logit) + log_sum + o.z_loss * lse * lse; });
        if (!gradient) return;
        const float factor = *o.scale * (o.weights.data == nullptr ? 1.0f : o.weights[row]) * inverse_temperature;
        const float probability = (1.0f + 2.0f * o.z_loss * lse) / sum;
        for_chunks(o.vocabulary, o.vocabulary, [&](std::int64_t column, int count) {
          const float* z = read(column, count);
          const int here = static_cast<int>(target - column < count ? target - column : -1);
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

// SPDX-License-Identifier: Apache-2.0
//
// Access of one team to a parameter row, whatever its storage type: read the weights, update in place. The backward
// passes of decoder and encoder and adam_rows all end in these functions, so that they give the same bits for the same
// gradient. A chunk is at most kChunkColumns columns inside one target segment and begins at a block border of 8-bit
// storage.
#pragma once

#include "base/contract.hpp"
#include "kernels/optimize/adam_rule.hpp"
#include "kernels/optimize/codec.hpp"
#include "kernels/optimize/epilogue.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

static_assert(kChunkColumns == kBlockColumns, "one scale per chunk");

struct AdamScratch {
  float first[kChunkColumns];
  float second[kChunkColumns];
  // 16 random bits for each weight, first and second moment; the first element of a chunk may be any of the 8 of its
  // group.
  std::uint16_t random[3][kChunkColumns + 2 * kElementsPerRandom];
};

/// The weights of a chunk as fp32: the row itself if stored as fp32, else widened into `buffer`.
KOKKOS_FORCEINLINE_FUNCTION const float* weight_chunk(const Team& team, const ParameterRows& parameters,
                                                      std::int64_t row, std::int64_t column, int count, float* buffer) {
  const Scalar type = parameters.storage == StorageType::fp32 ? Scalar::fp32 : Scalar::bf16;
  const AnyMatrix matrix{parameters.weight, type, parameters.rows, parameters.columns, parameters.columns};
  return row_chunk(team, matrix, row, column, count, buffer);
}

/// The random bits of `count` elements from `first_element` on (adam_rule.hpp). Returns i: those of element c are at
/// [i + c] of each array. The caller waits for the team.
KOKKOS_FORCEINLINE_FUNCTION int draw_rounding(const Team& team, const AdamStep& adam, std::uint64_t first_element,
                                              int count, AdamScratch& scratch) {
  const std::uint64_t first_group = first_element / kElementsPerRandom;
  const int offset = static_cast<int>(first_element % kElementsPerRandom);
  const int groups = (offset + count + kElementsPerRandom - 1) / kElementsPerRandom;
  for_columns(team, groups, [&](int group) {
    const Random4 random = rounding_random(adam, first_group + static_cast<std::uint64_t>(group));
    const int first = group * kElementsPerRandom;
    for (int part = 0; part < kElementsPerRandom; ++part) {
      const std::uint16_t bits = static_cast<std::uint16_t>(rounding_bits(random, part));
      scratch.random[0][first + part] = bits;
      scratch.random[1][first + (part ^ kFirstMomentPart)] = bits;
      scratch.random[2][first + (part ^ kSecondMomentPart)] = bits;
    }
  });
  return offset;
}

/// Applies `rule` to columns [column, column + count) of a row. gradient [count].
template <class Rule>
KOKKOS_FORCEINLINE_FUNCTION void update_chunk(const Team& team, const ParameterRows& parameters, std::int64_t row,
                                              std::int64_t column, int count, const float* gradient, const Rule& rule,
                                              const AdamStep& adam, AdamScratch& scratch) {
  const std::int64_t at = row * parameters.columns + column;
  if (parameters.storage == StorageType::fp32) {
    float* weight = static_cast<float*>(parameters.weight) + at;
    float* first = static_cast<float*>(parameters.first_moment) + at;
    float* second = static_cast<float*>(parameters.second_moment) + at;
    for_columns(team, count, [&](int c) {
      float w = weight[c], m = first[c], v = second[c];
      rule(adam, gradient[c], w, m, v);
      weight[c] = w;
      first[c] = m;
      second[c] = v;
    });
    return;
  }

  const std::uint64_t element = parameters.global_element(row, column);
  bf16* weight = static_cast<bf16*>(parameters.weight) + at;
  const int drawn = draw_rounding(team, adam, element, count, scratch);
  const std::uint16_t* const weight_random = scratch.random[0] + drawn;
  const std::uint16_t* const first_random = scratch.random[1] + drawn;
  const std::uint16_t* const second_random = scratch.random[2] + drawn;
  team.team_barrier();
  if (parameters.storage == StorageType::bf16) {
    bf16* first = static_cast<bf16*>(parameters.first_moment) + at;
    bf16* second = static_cast<bf16*>(parameters.second_moment) + at;
    for_columns(team, count, [&](int c) {
      float w = weight[c], m = first[c], v = second[c];
      rule(adam, gradient[c], w, m, v);
      weight[c] = to_bf16_stochastic(w, weight_random[c]);
      first[c] = to_bf16_stochastic(m, first_random[c]);
      second[c] = to_bf16_stochastic(v, second_random[c]);
    });
  } else {
    std::uint8_t* first = static_cast<std::uint8_t*>(parameters.first_moment) + at;
    std::uint8_t* second = static_cast<std::uint8_t*>(parameters.second_moment) + at;
    const std::int64_t block = row * parameters.blocks_per_row() +
                               column / parameters.segment * parameters.blocks_per_segment() +
                               column % parameters.segment / kBlockColumns;
    const float first_scale = parameters.first_scale[block];
    const float second_scale = parameters.second_scale[block];
    const bool decays = sum_columns<int>(team, count, [&](int c) { return gradient[c] != 0.0f ? 1 : 0; }) == 0;
    for_columns(team, count, [&](int c) {
      const float root = code_to_float(second[c]) * second_scale;
      float w = weight[c], m = code_to_float(first[c]) * first_scale, v = root * root;
      rule(adam, gradient[c], w, m, v);
      weight[c] = to_bf16_stochastic(w, weight_random[c]);
      scratch.first[c] = m;
      scratch.second[c] = sqrtf(v);
    });
    if (decays) {  // the codes stay
      once(team, [&] {
        parameters.first_scale[block] = decayed_scale(first_scale, adam.beta1);
        parameters.second_scale[block] = decayed_scale(second_scale, sqrtf(adam.beta2));
      });
      team.team_barrier();  // scratch is free again
      return;
    }
    const float new_first_scale = block_scale(
        max_columns(team, count, 0.0f, [&](int c) { return bits_float(float_bits(scratch.first[c]) & 0x7fffffffu); }));
    const float new_second_scale =
        block_scale(max_columns(team, count, 0.0f, [&](int c) { return scratch.second[c]; }));
    const float first_inverse = inverse_scale(new_first_scale), second_inverse = inverse_scale(new_second_scale);
    for_columns(team, count, [&](int c) {
      first[c] = code_stochastic(scratch.first[c] * first_inverse, first_random[c]);
      second[c] = code_stochastic_root(scratch.second[c] * second_inverse, second_random[c]);
    });
    once(team, [&] {
      parameters.first_scale[block] = new_first_scale;
      parameters.second_scale[block] = new_second_scale;
    });
  }
  team.team_barrier();  // scratch is free again
}

/// What a backward pass needs besides the memory of its parameters.
struct RowScratch {
  float gradient[kChunkColumns];  // dW of the chunk
  float weight[kChunkColumns];
  float row[kChunkColumns];  // a gradient or input row that is stored as bf16
  AdamScratch update;
  double noise[kChunkColumns + kNoiseBlock];  // of a private step; the first element may be any one of its block
};

/// Adds the noise of a private step to columns [column, column + count) of the gradient of a row.
KOKKOS_FORCEINLINE_FUNCTION void add_noise_chunk(const Team& team, const RowNoise& noise,
                                                 const ParameterRows& parameters, std::int64_t row, std::int64_t column,
                                                 int count, RowScratch& buffer) {
  const std::int64_t local = row * parameters.columns + column;
  const std::uint64_t first = static_cast<std::uint64_t>(parameters.first_row * parameters.columns + local);
  if (noise.given != nullptr) {
    const float* const given = noise.given[0] + local;
    for_columns(team, count, [&](int c) { buffer.gradient[c] = noise.add(buffer.gradient[c], given[c]); });
    return;
  }
  const int offset = static_cast<int>(first % kNoiseBlock), size = static_cast<int>(kNoiseBlock);
  for_columns(team, (offset + count + size - 1) / size, [&](int i) {
    const ChachaBlock block =
        chacha20(noise.stream.key, noise.stream.block(first / kNoiseBlock + static_cast<std::uint64_t>(i)));
    for (int pair = 0; pair < size / 2; ++pair) {
      const NormalPair normal = noise_pair(block, pair);
      buffer.noise[size * i + 2 * pair] = normal.first;
      buffer.noise[size * i + 2 * pair + 1] = normal.second;
    }
  });
  team.team_barrier();
  const double width = noise.width();
  for_columns(team, count,
              [&](int c) { buffer.gradient[c] = noise.add(buffer.gradient[c], width * buffer.noise[offset + c]); });
  team.team_barrier();
}

/// One row of a backward pass, chunk by chunk: form(column, count, weight) leaves dW of the chunk in buffer.gradient,
/// then the epilogue. `weight` is null unless `needs_weight` or the epilogue reads weights. step == nullptr: no update.
/// Returns the squared norm of the clipped gradient; 0 without `with_norm`, and for rows that have no gradient.
template <class Epilogue, class Form>
KOKKOS_FORCEINLINE_FUNCTION double walk_row(const Team& team, const ParameterRows& parameters, std::int64_t row,
                                            std::int64_t key, bool has_hits, bool needs_weight, bool with_norm,
                                            const Epilogue& epilogue, const AdamStep* step, const Form& form) {
  const bool has_gradient = has_hits || Epilogue::kHasExtra || Epilogue::kHasNoise;
  if (step == nullptr && !has_gradient) return 0.0;
  RowScratch& buffer = scratch<RowScratch>(team);
  AdamStep adam{};
  adam.gradient_scale = 1.0f;
  if (step != nullptr) adam = *step;
  double norm = 0.0;
  for_chunks(parameters.columns, parameters.segment, [&](std::int64_t column, int count) {
    const float* weight = needs_weight || Epilogue::kHasExtra
                              ? weight_chunk(team, parameters, row, column, count, buffer.weight)
                              : nullptr;
    form(column, count, weight, buffer);
    if constexpr (Epilogue::kHasExtra) {
      const float of_row = epilogue.extra.row(key);
      for_columns(team, count, [&](int c) { buffer.gradient[c] += epilogue.extra(of_row, weight[c]); });
    }
    if constexpr (Epilogue::kHasNoise) add_noise_chunk(team, epilogue.noise, parameters, row, column, count, buffer);
    if (with_norm && has_gradient)
      norm += sum_columns<double>(team, count, [&](int c) {
        const double g = adam.gradient_scale * buffer.gradient[c];
        return g * g;
      });
    if (step != nullptr)
      update_chunk(team, parameters, row, column, count, buffer.gradient, epilogue.rule, adam, buffer.update);
  });
  return norm;
}

/// Updates a bias: fp32, no weight decay. Called by one lane.
KOKKOS_FORCEINLINE_FUNCTION void adam_bias(const ParameterVector& parameters, std::int64_t i, float gradient,
                                           const AdamStep& adam) {
  float w = parameters.weight[i], m = parameters.first_moment[i], v = parameters.second_moment[i];
  adam_rule(adam, 0.0f, gradient, w, m, v);
  parameters.weight[i] = w;
  parameters.first_moment[i] = m;
  parameters.second_moment[i] = v;
}

/// Asserts, on the host, that the storage is one that these kernels read.
inline void require_portable_storage(const ParameterRows& parameters) {
  WEFT_ASSERT(parameters.weight_rest == nullptr && parameters.packing == Packing::none);
  WEFT_ASSERT(parameters.segment > 0 && parameters.columns % parameters.segment == 0);
  static_cast<void>(parameters);
}

}  // namespace weft::kernels

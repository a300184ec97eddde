// SPDX-License-Identifier: Apache-2.0
//
// Limit: the latency of one launch and of a chain of sums; 10 answers with 384 columns are 15 KB. One H200: 3.1 us in a
// graph, where an empty kernel takes 0.4; a quarter of it are the first reads. Two kernels:
//
//   few_answers    a block per prompt, a warp per answer, which keeps its embedding in registers; all z in shared
//   memory many_answers   a cluster of blocks per prompt, which share its columns; a warp computes 128 columns of every
//                  `groups`-th answer, and reads them three times, the last two from the first-level cache
//
// Each has three passes with a barrier between:
//
//   1. squares of the answers        sums over columns
//   2. sums of z and of R z          sums over answers
//   3. |y|^2 and y . W               sums over columns
//
// W = sum_i R_i z_i - T c. The order of all sums depends on the shapes alone.
#include <algorithm>

#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/launch_cuda.cuh"

namespace weft::kernels {

namespace portable {
decltype(kernels::set_advantages) set_advantages;
}  // namespace portable

namespace cuda {
namespace {

constexpr int kMostWarps = 16, kMostBlocks = 8;  ///< of a block, and of a cluster
constexpr int kLaneColumns = 4, kWarpColumns = kWarp * kLaneColumns;
constexpr int kRows = 4;  ///< answers that a warp of many_answers reads together

/// Division of the work of a prompt over its blocks in many_answers.
struct Division {
  int blocks = 1;        ///< of a prompt
  int column_warps = 1;  ///< of a block: warps with adjacent columns
  int groups = 1;        ///< of a block: warps with the same columns, each with its answers

  /// Number of parts of a sum over the columns.
  WEFT_HOST_DEVICE int parts() const { return blocks * column_warps; }
  int warps() const { return column_warps * groups; }
  std::int64_t shared_bytes(std::int64_t samples) const {
    return static_cast<std::int64_t>(sizeof(double)) *
           (samples * (2 * parts() + 1) + std::int64_t{2} * warps() * kWarpColumns);
  }
};

Division division(const AnswerSets& sets) {
  const std::int64_t column_warps = (sets.embeddings.columns + kWarpColumns - 1) / kWarpColumns;
  Division out;
  if (has_clusters()) out.blocks = static_cast<int>(std::clamp<std::int64_t>(column_warps, 1, kMostBlocks));
  out.column_warps =
      static_cast<int>(std::clamp<std::int64_t>((column_warps + out.blocks - 1) / out.blocks, 1, 1 << 20));
  out.groups = static_cast<int>(
      std::clamp<std::int64_t>((sets.samples + kRows - 1) / kRows, 1, std::max(1, kMostWarps / out.column_warps)));
  return out;
}

struct Arguments {
  SetRule rule;
  SetFactors factors;  ///< for prompts without an empty answer
  Division division;   ///< of many_answers
  bool vectors;        ///< fp32, of which kLaneColumns columns can be read at once
  AnswerSets sets;
  SetAdvantages out;
};

/// Sums over the lanes, kCount at once: a lane keeps half of the values in each step and gives the other half away.
/// Returns that of value lane * kCount / kWarp.
template <int kCount>
__device__ __forceinline__ double warp_sums(double (&value)[kCount], int lane) {
  int offset = kWarp / 2;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const double kept = upper ? value[i + half] : value[i], given = upper ? value[i] : value[i + half];
      value[i] = kept + __shfl_xor_sync(kAllLanes, given, offset);
    }
  }
  for (; offset > 0; offset /= 2) value[0] += __shfl_xor_sync(kAllLanes, value[0], offset);
  return value[0];
}

/// Inverse length 1 / |e|, or 0 for an empty answer. For infinity: NaN, not 0.
__device__ __forceinline__ double inverse_length(double square) {
  return square == 0 ? 0.0 : rsqrt(square) + (square - square);
}

/// Loads the columns of a lane, zeros beyond the last column.
__device__ __forceinline__ void load_lane(const AnyMatrix& e, std::int64_t row, std::int64_t column, bool vectors,
                                          double (&value)[kLaneColumns]) {
  const std::int64_t at = row * e.stride + column;
  if (vectors && column < e.columns) {
    const float4 word = *reinterpret_cast<const float4*>(static_cast<const float*>(e.data) + at);
    value[0] = word.x, value[1] = word.y, value[2] = word.z, value[3] = word.w;
    return;
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c)
    value[c] = column + c < e.columns ? static_cast<double>(load_element(e.data, e.type, at + c)) : 0.0;
}

/// Stores the results of an answer, zeros for an empty answer.
__device__ __forceinline__ void store_answer(const Arguments& a, const SetFactors& factors, const SetSums& sums,
                                             std::int64_t row, bool present, double reward, double s, double q) {
  a.out.distances[row] = present ? s : 0.0;
  a.out.advantages[row] = present ? set_advantage(a.rule, factors, sums, reward, s, q) : 0.0;
}
__device__ __forceinline__ void store_prompt(const Arguments& a, const SetFactors& factors, const SetSums& sums,
                                             std::int64_t prompt) {
  a.out.counts[prompt] = sums.count;
  a.out.diversity[prompt] = mean_distance(factors, sums);
  a.out.objective[prompt] = expected_objective(a.rule, factors, sums);
}

// --- Few answers ----------------------------------------------------------------------------------------------------

constexpr std::int64_t few_answers_bytes(std::int64_t samples, int vectors) {
  return (samples + 2) * vectors * kWarpColumns * static_cast<std::int64_t>(sizeof(double));
}

/// Up to kMostWarps answers, a warp each, and kVectors * kWarpColumns columns.
template <int kVectors>
__global__ void __launch_bounds__(kMostWarps* kWarp) few_answers(const __grid_constant__ Arguments a) {
  constexpr int kBatch = 8;                            // answers that a thread reads together
  constexpr int kPairs = kVectors * kWarpColumns / 2;  // of columns, in the order in which lanes read them
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, answer = thread / kWarp;
  const int samples = static_cast<int>(a.sets.samples);
  const std::int64_t prompt = blockIdx.x, first = prompt * samples;
  extern __shared__ double2 shared[];
  double2* const all = shared;                      // [samples][kPairs]: z
  double2* const centres = all + samples * kPairs;  // [kPairs]
  double2* const weights = centres + kPairs;        // [kPairs]: W
  __shared__ double scales[kMostWarps], rewards[kMostWarps], squares[kMostWarps], products[kMostWarps];

  await_previous_kernel();
  double z[kVectors][kLaneColumns], parts[kLaneColumns] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    load_lane(a.sets.embeddings, first + answer, (v * kWarp + lane) * kLaneColumns, a.vectors, z[v]);
  const double own_reward = a.sets.rewards.data[first + answer];
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) parts[c] += z[v][c] * z[v][c];
  const double scale = inverse_length(warp_sum((parts[0] + parts[1]) + (parts[2] + parts[3])));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) z[v][c] *= scale;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      all[answer * kPairs + (2 * v + half) * kWarp + lane] = make_double2(z[v][2 * half], z[v][2 * half + 1]);
  }
  if (lane == 0) {
    scales[answer] = scale;
    rewards[answer] = scale != 0 ? own_reward : 0.0;  // that of an empty answer may be NaN
  }
  const int count = __syncthreads_count(lane == 0 && scale != 0);
  allow_next_kernel();
  const SetFactors factors = count == samples ? a.factors : set_factors(a.rule, count);

  double all_rewards = 0;  // of the first warp at least, which needs it below
  for (int pair = thread; pair < kPairs; pair += static_cast<int>(blockDim.x)) {
    double2 centre = {0, 0}, weight = {0, 0};
    all_rewards = 0;
    for (int begin = 0; begin < samples; begin += kBatch)
#pragma unroll
      for (int i = begin; i < begin + kBatch; ++i) {
        if (i >= samples) break;
        const double2 value = all[i * kPairs + pair];
        const double reward = rewards[i];
        all_rewards += reward;
        centre.x += value.x, centre.y += value.y;
        weight.x += reward * value.x, weight.y += reward * value.y;
      }
    centre.x *= factors.answers, centre.y *= factors.answers;
    weight.x -= all_rewards * centre.x, weight.y -= all_rewards * centre.y;
    centres[pair] = centre;
    weights[pair] = weight;
  }
  __syncthreads();

  double2 own = {0, 0}, with = {0, 0};
#pragma unroll
  for (int part = 0; part < 2 * kVectors; ++part) {
    const double2 centre = centres[part * kWarp + lane], weight = weights[part * kWarp + lane];
    const double x = z[part / 2][part % 2 * 2] - centre.x, y = z[part / 2][part % 2 * 2 + 1] - centre.y;
    own.x += x * x, own.y += y * y;
    with.x += x * weight.x, with.y += y * weight.y;
  }
  double of_lanes[2] = {own.x + own.y, with.x + with.y};
  const double sum = warp_sums(of_lanes, lane);  // |y|^2 on the first half of the lanes, y . W on the second
  if (lane == 0) squares[answer] = sum;
  if (lane == kWarp / 2) products[answer] = sum;
  __syncthreads();

  if (answer != 0) return;  // the rest is a lane per answer
  const bool present = lane < samples && scales[lane] != 0;
  const double reward = present ? rewards[lane] : 0.0, square = present ? squares[lane] : 0.0,
               product = present ? products[lane] : 0.0;
  const double spread = warp_sum(square), weighted_spread = warp_sum(reward * square), m = count;
  const SetSums sums{count, all_rewards, m * spread / 2, (m * weighted_spread + all_rewards * spread) / 2};
  if (lane < samples)
    store_answer(a, factors, sums, first + lane, present, reward, (m * square + spread) / 2,
                 (all_rewards * square + weighted_spread) / 2 - product);
  if (lane == 0) store_prompt(a, factors, sums, prompt);
}

/// The kernel with the least vectors that hold the columns; nullptr: none, or there are too many answers.
struct FewAnswers {
  void (*kernel)(Arguments) = nullptr;
  std::int64_t shared = 0;
};
template <int... kVectors>
FewAnswers few_answers_of(const AnswerSets& sets) {
  FewAnswers out;
  const auto take = [&](int vectors, void (*kernel)(Arguments)) {
    const std::int64_t shared = few_answers_bytes(sets.samples, vectors);
    if (out.kernel == nullptr && sets.embeddings.columns <= vectors * kWarpColumns && shared <= kDynamicSharedMemory)
      out = {kernel, shared};
  };
  if (sets.samples <= kMostWarps) (take(kVectors, few_answers<kVectors>), ...);
  return out;
}

// --- Many answers, or many columns ----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kMostWarps* kWarp) many_answers(const __grid_constant__ Arguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int blocks = a.division.blocks, column_warps = a.division.column_warps, groups = a.division.groups;
  const int parts = a.division.parts(), group = warp / column_warps, warp_column = warp % column_warps;
  const int block = static_cast<int>(blockIdx.x) % blocks, part = block * column_warps + warp_column;
  const int samples = static_cast<int>(a.sets.samples);
  const std::int64_t prompt = blockIdx.x / static_cast<unsigned>(blocks), first = prompt * samples;
  const std::int64_t column = (std::int64_t{part} * kWarp + lane) * kLaneColumns;
  const double* const rewards = a.sets.rewards.data + first;
  extern __shared__ double2 shared[];
  double* const inverse = reinterpret_cast<double*>(shared);  // [samples]: 1 / |e|, or 0 of an empty answer
  double* const sums = inverse + samples;                     // [2][samples][parts]: of pass 1 and 3, all blocks
  double* const columns = sums + 2 * samples * parts;         // [warps][2 * kLaneColumns][kWarp]: of pass 2
  __shared__ double group_rewards[kMostWarps];

  // Answers `row + r * groups`; zeros beyond the last.
  const auto load = [&](int row, double(&e)[kRows][kLaneColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) e[r][c] = 0;
      if (row + r * groups < samples) load_lane(a.sets.embeddings, first + row + r * groups, column, a.vectors, e[r]);
    }
  };
  // Adds values up over the lanes and gives them to all blocks of the prompt: kCount / kRows sums of kRows answers.
  const auto share = [&](int row, auto& value) {
    constexpr int kCount = sizeof(value) / sizeof(double), kLanes = kWarp / kCount;
    const double sum = warp_sums(value, lane);
    const int index = lane / kLanes, answer = row + index % kRows * groups;
    if (answer >= samples) return;
    double* const to = sums + (index / kRows * samples + answer) * parts + part;
    for (int other = lane % kLanes; other < blocks; other += kLanes) *in_cluster(to, other) = sum;
  };
  const auto total = [&](int index, int answer) {
    double sum = 0;
    for (int p = 0; p < parts; ++p) sum += sums[(index * samples + answer) * parts + p];
    return sum;
  };

  await_previous_kernel();
  meet_cluster();  // all blocks have started
  for (int row = group; row < samples; row += kRows * groups) {
    double e[kRows][kLaneColumns], square[kRows];
    load(row, e);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      square[r] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) square[r] += e[r][c] * e[r][c];
    }
    share(row, square);
  }
  sync_cluster();
  int count = 0;
  for (int begin = 0; begin < samples; begin += static_cast<int>(blockDim.x)) {
    const int answer = begin + static_cast<int>(threadIdx.x);
    double scale = 0;
    if (answer < samples) inverse[answer] = scale = inverse_length(total(0, answer));
    count += __syncthreads_count(scale != 0);
  }
  meet_cluster();  // all blocks have read the sums of the first pass
  const SetFactors factors = count == samples ? a.factors : set_factors(a.rule, count);

  double centre[kLaneColumns] = {}, weighted[kLaneColumns] = {}, all_rewards = 0;
  for (int row = group; row < samples; row += kRows * groups) {
    double e[kRows][kLaneColumns];
    load(row, e);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int answer = row + r * groups;
      const double scale = answer < samples ? inverse[answer] : 0.0, reward = scale != 0 ? rewards[answer] : 0.0;
      all_rewards += reward;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const double z = scale * e[r][c];
        centre[c] += z;
        weighted[c] += reward * z;
      }
    }
  }
  const auto column_sums = [&](int of) {
    return columns + (of * column_warps + warp_column) * 2 * kWarpColumns + lane;
  };
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    column_sums(group)[c * kWarp] = centre[c];
    column_sums(group)[(kLaneColumns + c) * kWarp] = weighted[c];
    centre[c] = weighted[c] = 0;
  }
  if (warp_column == 0 && lane == 0) group_rewards[group] = all_rewards;
  __syncthreads();
  all_rewards = 0;
  for (int of = 0; of < groups; ++of) {
    const double* const from = column_sums(of);
    all_rewards += group_rewards[of];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      centre[c] += from[c * kWarp];
      weighted[c] += from[(kLaneColumns + c) * kWarp];
    }
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    centre[c] *= factors.answers;
    weighted[c] -= all_rewards * centre[c];
  }

  for (int row = group; row < samples; row += kRows * groups) {
    double e[kRows][kLaneColumns], value[2 * kRows];
    load(row, e);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const double scale = row + r * groups < samples ? inverse[row + r * groups] : 0.0;
      value[r] = value[kRows + r] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const double y = scale * e[r][c] - centre[c];
        value[r] += y * y;
        value[kRows + r] += y * weighted[c];
      }
    }
    share(row, value);
  }
  sync_cluster();
  allow_next_kernel();

  // Every warp adds up the answers: no further barrier.
  double spread = 0, weighted_spread = 0;
  for (int answer = lane; answer < samples; answer += kWarp) {
    if (inverse[answer] == 0) continue;
    const double square = total(0, answer);
    spread += square;
    weighted_spread += rewards[answer] * square;
  }
  spread = warp_sum(spread);
  weighted_spread = warp_sum(weighted_spread);
  const double m = count;
  const SetSums of_prompt{count, all_rewards, m * spread / 2, (m * weighted_spread + all_rewards * spread) / 2};
  const int thread = block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  if (thread == 0) store_prompt(a, factors, of_prompt, prompt);
  for (int answer = thread; answer < samples; answer += blocks * static_cast<int>(blockDim.x)) {
    const double square = total(0, answer);
    store_answer(a, factors, of_prompt, first + answer, inverse[answer] != 0, rewards[answer],
                 (m * square + spread) / 2, (all_rewards * square + weighted_spread) / 2 - total(1, answer));
  }
}

/// Launches a kernel. blocks: of a prompt. shared: bytes, at most kDynamicSharedMemory.
void launch(const Execution& execution, void (*kernel)(Arguments), const Arguments& arguments, int blocks, int warps,
            std::int64_t shared) {
  launch_early(execution, "set_advantages", kernel, dim3(static_cast<unsigned>(arguments.sets.prompts * blocks)),
               warps * kWarp, shared, blocks, arguments, {.most_shared = false});
}

}  // namespace

void set_advantages(const Execution& execution, const SetRule& rule, const AnswerSets& sets, Array<double> workspace,
                    const SetAdvantages& out) {
  const AnyMatrix& e = sets.embeddings;
  const bool vectors =
      e.type == Scalar::fp32 && e.columns % kLaneColumns == 0 && e.stride % kLaneColumns == 0 && is_aligned(e.data, 16);
  const Division divided = division(sets);
  const Arguments arguments{rule, set_factors(rule, sets.samples), divided, vectors, sets, out};
  if (const FewAnswers few = few_answers_of<1, 3, 6, 8>(sets); few.kernel != nullptr)
    return launch(execution, few.kernel, arguments, 1, static_cast<int>(sets.samples), few.shared);
  // Hundreds of answers, which no set has, or very many columns: their sums do not fit shared memory.
  const std::int64_t shared = divided.shared_bytes(sets.samples);
  if (divided.warps() > kMostWarps || shared > kDynamicSharedMemory)
    return portable::set_advantages(execution, rule, sets, workspace, out);
  launch(execution, many_answers, arguments, divided.blocks, divided.warps(), shared);
}

}  // namespace cuda
}  // namespace weft::kernels

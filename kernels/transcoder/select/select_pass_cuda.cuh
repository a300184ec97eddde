// SPDX-License-Identifier: Apache-2.0
//
// A pass over the tiles: the limits computed before it, the filter, the repeated passes, and the decision about another
// pass. Included by select_cuda.cu only.
#pragma once

#include "kernels/transcoder/select/select_view_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// Computes the limits for the filter, for topk copies the biases; with `first` also resets the state for a new batch.
/// Without it, clears the segments of layers that are listed again, if `clears`: tiles then have several blocks, and
/// use the first one only.
///
/// fp32(product + bias) > threshold implies product > threshold - bias exactly (rounding is monotone and the threshold
/// is a float), so product > limit for any limit that is not above the difference. The few that pass by mistake are
/// rejected when the sum is formed.
template <class T, class Limit>
__global__ void __launch_bounds__(kThreads)
    begin_pass(View view, LayerBias bias, LayerBias bounds, bool first, bool clears, Count budget, bool relu) {
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  const std::int64_t n_threads = gridDim.x * static_cast<std::int64_t>(kThreads);
  if (first) {
    if (view.histogram != nullptr)
      for (std::int64_t i = thread; i < kHistogramRounds * view.n_groups * kHistogramBins; i += n_threads)
        view.histogram[i] = 0;
    if (thread < view.n_groups) {
      Group& group = view.group[thread];
      group = {};
      group.search.wanted = budget;
      if (relu) group.room = budget;  // all entries that passed, including zeros that exceed a negative bound
    }
    if (thread == 0) {
      view.control->again = 0;
      view.control->passes = 1;
      view.control->failed = SelectionFailure::none;
      view.control->cuts_here = 0;
    }
    if (view.several)
      for (std::int64_t i = thread; i < std::int64_t{view.n_slices} * view.n_groups * kLastBins; i += n_threads)
        view.last_round[i] = 0;
    if (view.n_features == 0 && view.word != nullptr) {  // a shard without tiles: no tile resets its lists
      const std::int64_t lists = view.n_groups * view.n_tokens;
      for (std::int64_t i = thread; i < lists; i += n_threads) view.above[i] = view.admit[i] = 0;
      for (std::int64_t i = thread; i < lists * view.most; i += n_threads) view.word[i] = 0;
    }
  } else if (thread == 0) {
    ++view.control->passes;
  }
  if (!first && clears) {
    const std::int64_t of_token = static_cast<std::int64_t>(view.n_layers) * view.n_blocks;
    for (std::int64_t i = thread; i < view.n_tokens * of_token; i += n_threads)
      if (view.group[view.group_of(static_cast<int>(i % of_token / view.n_blocks))].mode != kSettled)
        view.segment[i] = make_uint2(0, 0);
  }
  Limit* limit = static_cast<Limit*>(view.limit);
  for (std::int64_t i = thread; i < view.n_layers * view.padded_features; i += n_threads) {
    const int layer = static_cast<int>(i / view.padded_features);
    const std::int64_t feature = i % view.padded_features;
    if (view.bias != nullptr) {
      view.bias[i] = feature < view.n_features ? bias.layer[layer][feature] : -INFINITY;
      continue;
    }
    const int g = view.group_of(layer);
    if (!first && view.group[g].mode != kFilter) continue;
    const std::uint32_t threshold = relu ? 0 : view.threshold[g];
    if (feature >= view.n_features || threshold >= kLargestKey) {
      limit[i] = static_cast<Limit>(Vector<T>::nothing());
      continue;
    }
    const float bound = bounds.layer[layer] != nullptr ? bounds.layer[layer][feature] : __uint_as_float(threshold);
    limit[i] = static_cast<Limit>(Vector<T>::below(__fsub_rd(bound, bias.layer[layer][feature])));
  }
}

/// Returns the threshold that an entry must exceed, unless its feature has a bound. relu ignores the checkpointed
/// threshold. Beyond infinity no entry passes.
__device__ __forceinline__ float threshold_of(const View& view, int g, bool relu) {
  return relu ? 0.0f : __uint_as_float(min(view.threshold[g], kLargestKey));
}

// ---- the pass over a tile ------------------------------------------------------------------------------------------

/// Visits the entries of a span of one row that exceed the threshold, or their bound if there are bounds: `visit(ballot
/// of passing lanes, own passes, column, r)`. Called by one warp.
template <class T, class Visit>
__device__ __forceinline__ void scan_span(const T* row, const float* bias, const float* bounds, int begin, int end,
                                          float threshold, int lane, Visit&& visit) {
  for (int first = begin; first < end; first += 32) {
    const int at = first + lane;
    const float r = at < end ? static_cast<float>(row[at]) + bias[at] : 0.0f;
    const bool passes = r > (bounds != nullptr && at < end ? bounds[at] : threshold);
    visit(__ballot_sync(kAll, passes), passes, at, r);
  }
}

/// Appends the entries that exceed the threshold to the list. kWarpsPerRow warps share kShared rows, each with its own
/// span of columns; the block reserves space for all its rows at once. The loop only compares with the limits, which
/// serve all shared rows; biases are added afterwards to the few that passed. Reads the tile once; bound by memory
/// bandwidth.
template <class T, int kWarpsPerRow>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) filter_tile(View view, Piece piece, bool relu) {
  using V = Vector<T>;
  constexpr int kRows = kWarps / kWarpsPerRow * kShared;
  __shared__ uint2 buffer[kWarps][kShared][kBuffer];
  __shared__ int count[kRows][kWarpsPerRow];
  __shared__ Count base;
  const int g = view.group_of(piece.layer);
  if (view.group[g].mode != kFilter || (view.open != nullptr && view.open[piece.layer] == 0)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % kWarpsPerRow;
  const int first_row = warp / kWarpsPerRow * kShared;  // among the rows of the block
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kRows) + first_row;
  const float threshold = threshold_of(view, g, relu);
  const int vectors = (piece.columns + V::kSize - 1) / V::kSize;
  const int span = ((vectors + kWarpsPerRow - 1) / kWarpsPerRow + 31) / 32 * 32;
  const int begin = min(vectors, part * span), end = min(vectors, begin + span);
  const T* products = static_cast<const T*>(piece.data) + row * piece.stride;
  const uint4* limits = reinterpret_cast<const uint4*>(static_cast<const T*>(view.limit) +
                                                       piece.layer * view.padded_features + piece.feature_begin);
  int n[kShared] = {};
  for (int first = begin; first < end; first += 32 * kInFlight) {
    uint4 x[kShared][kInFlight], limit[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * 32 + lane;
      const std::uint32_t nothing = V::nothing_word();
      limit[i] = at < end ? __ldg(limits + at) : make_uint4(nothing, nothing, nothing, nothing);
    }
#pragma unroll
    for (int r = 0; r < kShared; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = first + i * 32 + lane;
        const uint4* line = reinterpret_cast<const uint4*>(products + r * piece.stride);
        // Values beyond the end are NaN, which exceeds no limit.
        x[r][i] = at < end && row + r < piece.rows ? __ldcs(line + at) : make_uint4(kAll, kAll, kAll, kAll);
      }
#pragma unroll
    for (int r = 0; r < kShared; ++r)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const bool hit = V::any(x[r][i], limit[i]);
        if (!__any_sync(kAll, hit)) continue;
        std::uint32_t above = 0;
        if (hit) {
#pragma unroll
          for (int j = 0; j < V::kSize; ++j) above |= V::get(x[r][i], j) > V::get(limit[i], j) ? 1u << j : 0u;
        }
        // Usually at most one entry per lane; then the ballot gives its place.
        const unsigned voters = __ballot_sync(kAll, above != 0);
        int total = __popc(voters);
        int to = n[r] + __popc(voters & ((1u << lane) - 1));
        if (__any_sync(kAll, (above & (above - 1)) != 0)) to = n[r] + warp_exclusive(__popc(above), lane, total);
        n[r] += total;
        const int column = (first + i * 32 + lane) * V::kSize;
#pragma unroll
        for (int j = 0; j < V::kSize; ++j)
          if (above >> j & 1) {
            if (to < kBuffer) buffer[warp][r][to] = make_uint2(column + j, __float_as_uint(V::get(x[r][i], j)));
            ++to;
          }
      }
  }
  // Entries above the limits: add the bias and compare again. A crowded span is counted by reading it once more.
  constexpr int kChunks = kBuffer / 32;
  bool crowded[kShared];
  uint2 entry[kShared][kChunks];
  unsigned passing[kShared][kChunks] = {};
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kShared; ++r) {
    crowded[r] = n[r] > kBuffer;
    int left = 0;
    if (crowded[r]) {
      if (row + r < piece.rows)
        scan_span(products + r * piece.stride, piece.bias, piece.bounds, begin * V::kSize,
                  min(end * V::kSize, piece.columns), threshold, lane,
                  [&](unsigned voters, bool, int, float) { left += __popc(voters); });
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool in_use = c * 32 + lane < n[r];
        entry[r][c] = in_use ? buffer[warp][r][c * 32 + lane] : make_uint2(0, 0);
        const float sum = in_use ? __uint_as_float(entry[r][c].y) + __ldg(piece.bias + entry[r][c].x) : 0.0f;
        entry[r][c].y = __float_as_uint(sum);
        const float bound = in_use && piece.bounds != nullptr ? __ldg(piece.bounds + entry[r][c].x) : threshold;
        passing[r][c] = __ballot_sync(kAll, in_use && sum > bound);
        left += __popc(passing[r][c]);
      }
    }
    if (lane == 0) count[first_row + r][part] = left;
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int kCounts = kRows * kWarpsPerRow;
    int total;
    const int own = lane < kCounts ? (&count[0][0])[lane] : 0;
    const int before = warp_exclusive(own, lane, total);
    __syncwarp();
    if (lane < kCounts) (&count[0][0])[lane] = before;
    Count start = 0;
    if (lane == 0) start = atomicAdd(&view.group[g].cursor, static_cast<Count>(total));
    start = __shfl_sync(kAll, start, 0);
    const bool fits = start + total <= static_cast<Count>(view.capacity);
    if (lane == 0) base = fits ? start : ~Count{0};
    // Lane q * kWarpsPerRow ends where lane (q + 1) * kWarpsPerRow begins.
    const int after = __shfl_down_sync(kAll, before, kWarpsPerRow % 32);
    const int entries = (lane + kWarpsPerRow < kCounts ? after : total) - before;
    const std::int64_t own_row = blockIdx.x * static_cast<std::int64_t>(kRows) + lane / kWarpsPerRow;
    if (lane < kCounts && lane % kWarpsPerRow == 0 && own_row < piece.rows)
      view.segment[((piece.token_begin + own_row) * view.n_layers + piece.layer) * view.n_blocks + piece.block] =
          make_uint2(static_cast<std::uint32_t>(g * view.capacity + static_cast<std::int64_t>(start) + before),
                     fits ? static_cast<std::uint32_t>(entries) : 0u);
  }
  __syncthreads();
  if (base == ~Count{0}) return;
  const std::uint32_t key_base = static_cast<std::uint32_t>(piece.layer * view.n_features + piece.feature_begin);
#pragma unroll
  for (int r = 0; r < kShared; ++r) {
    std::int64_t to = g * view.capacity + static_cast<std::int64_t>(base) + count[first_row + r][part];
    const unsigned lower = (1u << lane) - 1;
    if (!crowded[r]) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (passing[r][c] >> lane & 1) {
          const std::int64_t place = to + __popc(passing[r][c] & lower);
          view.key[place] = key_base + entry[r][c].x;
          view.value[place] = __uint_as_float(entry[r][c].y);
        }
        to += __popc(passing[r][c]);
      }
    } else if (row + r < piece.rows) {
      scan_span(products + r * piece.stride, piece.bias, piece.bounds, begin * V::kSize,
                min(end * V::kSize, piece.columns), threshold, lane,
                [&](unsigned voters, bool passes, int column, float sum) {
                  const std::int64_t place = to + __popc(voters & lower);
                  if (passes) {
                    view.key[place] = key_base + column;
                    view.value[place] = sum;
                  }
                  to += __popc(voters);
                });
    }
  }
}

/// Repeated passes over a tile: histograms, counts of ties, admission of ties. A warp processes whole rows. Entries
/// beyond the list are counted, not stored; `decide` finds them.
template <class T>
__global__ void __launch_bounds__(kThreads) survey_tile(View view, Piece piece) {
  __shared__ std::uint32_t bins[kHistogramBins];
  const int g = view.group_of(piece.layer);
  Group& group = view.group[g];
  const std::uint32_t mode = group.mode;
  if (mode == kFilter || mode == kSettled) return;
  const int lane = threadIdx.x & 31;
  const std::uint32_t threshold = view.threshold[g];
  const HistogramRound round = group.search.round();
  if (mode == kHistogram) {
    for (int b = threadIdx.x; b < kHistogramBins; b += kThreads) bins[b] = 0;
    __syncthreads();
  }
  const std::uint32_t key_base = static_cast<std::uint32_t>(piece.layer * view.n_features + piece.feature_begin);
  for (std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kWarps) + threadIdx.x / 32; row < piece.rows;
       row += gridDim.x * static_cast<std::int64_t>(kWarps)) {
    const T* product = static_cast<const T*>(piece.data) + row * piece.stride;
    const std::int64_t token = piece.token_begin + row;
    const auto key_at = [&](int at) {
      return at < piece.columns ? selection_key(static_cast<float>(product[at]) + piece.bias[at]) : 0u;
    };
    if (mode == kHistogram) {
      for (int at = lane; at < piece.columns; at += 32) {
        const int bin = round.bin(key_at(at));
        if (bin >= 0) atomicAdd(&bins[bin], 1u);
      }
      continue;
    }
    int above = 0, tied = 0;
    for (int at = lane; at < piece.columns; at += 32) {
      const std::uint32_t key = key_at(at);
      above += key > threshold;
      tied += key == threshold;
    }
    above = warp_total(above);
    tied = warp_total(tied);
    const std::int64_t place = g * view.n_tokens + token;
    if (mode == kCountTies) {
      if (lane == 0) view.tied[place] += tied;
      continue;
    }
    int room = static_cast<int>(min(view.admit[place] - view.used[place], static_cast<std::uint32_t>(tied)));
    const int entries = above + room;
    Count base = 0;
    if (lane == 0) base = atomicAdd(&group.cursor, static_cast<Count>(entries));
    base = __shfl_sync(kAll, base, 0);
    const bool fits = base + static_cast<Count>(entries) <= static_cast<Count>(view.capacity);
    std::int64_t to = g * view.capacity + static_cast<std::int64_t>(base);
    if (lane == 0) {
      view.used[place] += room;
      view.segment[(token * view.n_layers + piece.layer) * view.n_blocks + piece.block] =
          make_uint2(static_cast<std::uint32_t>(to), fits ? static_cast<std::uint32_t>(entries) : 0u);
    }
    for (int first = 0; first < piece.columns && entries > 0 && fits; first += 32) {
      const std::uint32_t key = key_at(first + lane);
      const unsigned before = (1u << lane) - 1;
      const unsigned equal = __ballot_sync(kAll, key == threshold);
      const bool stays = key > threshold || (key == threshold && __popc(equal & before) < room);
      room = max(0, room - __popc(equal));
      const unsigned staying = __ballot_sync(kAll, stays);
      if (stays) {
        view.key[to + __popc(staying & before)] = key_base + first + lane;
        view.value[to + __popc(staying & before)] = __uint_as_float(key);
      }
      to += __popc(staying);
    }
  }
  if (mode == kHistogram) {
    __syncthreads();
    for (int b = threadIdx.x; b < kHistogramBins; b += kThreads)
      if (bins[b] != 0) atomicAdd(&view.survey[g * kHistogramBins + b], static_cast<Count>(bins[b]));
  }
}

/// Sets the next task of a group: filter -> (kSettled | histograms -> filter | ties -> admit). All threads of a block
/// call it.
__device__ void advance(const View& view, int g) {
  Group& group = view.group[g];
  Count* survey = view.survey + g * static_cast<std::int64_t>(kHistogramBins);
  const auto clear_survey = [&] {
    for (int b = threadIdx.x; b < kHistogramBins; b += blockDim.x) survey[b] = 0;
  };
  const std::uint32_t mode = group.mode;
  const std::int64_t tokens = g * view.n_tokens;
  KeySearch<Count> search = group.search;
  __syncthreads();
  if (mode == kFilter) {
    clear_survey();
    if (threadIdx.x == 0) {
      group.mode = kHistogram;
      group.search = {search.wanted};
    }
  } else if (mode == kHistogram) {
    search.advance(pick_bin_by_block(survey, search.rank()));
    if (search.exhausted || search.reaching() <= static_cast<Count>(view.capacity)) {
      if (threadIdx.x == 0) {
        group.mode = kFilter;
        group.cursor = 0;
        view.threshold[g] = search.threshold();
      }
    } else if (search.rounds < kHistogramRounds) {
      clear_survey();
    } else {
      for (std::int64_t n = threadIdx.x; n < view.n_tokens; n += blockDim.x) view.tied[tokens + n] = 0;
      if (threadIdx.x == 0) {
        group.mode = kCountTies;
        view.threshold[g] = search.key();
      }
    }
    if (threadIdx.x == 0) group.search = search;
  } else if (mode == kCountTies) {
    const Count kept = search.ties_kept();
    Count total_before = 0;
    for (std::int64_t first = 0; first < view.n_tokens; first += blockDim.x) {
      const std::int64_t n = first + threadIdx.x;
      const Count tied = n < view.n_tokens ? view.tied[tokens + n] : 0;
      Count total;
      const Count before = total_before + block_exclusive(tied, total);
      if (n < view.n_tokens) {
        view.admit[tokens + n] = static_cast<std::uint32_t>(ties_admitted(tied, before, kept));
        view.used[tokens + n] = 0;
      }
      total_before += total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      group.mode = kAdmit;
      group.cursor = 0;
      group.ties_cut = total_before - kept;
    }
  } else if (mode == kAdmit) {
    if (threadIdx.x == 0) group.mode = kSettled;
  }
  __syncthreads();
}

/// Writes the counts that this rank found with its threshold, to be summed over all ranks. Only with several ranks.
__global__ void __launch_bounds__(kMostLayers) report_pass(View view) {
  const int g = threadIdx.x;
  if (g >= view.n_groups) return;
  const std::uint32_t guess = view.threshold[g];
  const Count upper = guess >> 16, lower = guess & 0xffffu;
  view.group[g].guess = guess;
  view.agreement[g] = {view.group[g].cursor, upper, upper * upper, lower, lower * lower};
}

/// Marks the selection of group g as not valid. Called by one thread.
__device__ void fail(const View& view, int g, SelectionFailure::Kind kind) {
  Control& control = *view.control;
  control.failed = kind;
  if (view.fault != nullptr) *view.fault = 1;
  if (control.first.kind != SelectionFailure::none) return;
  const Group& group = view.group[g];
  control.first = {kind, static_cast<std::uint32_t>(g), static_cast<std::int64_t>(group.cursor), view.capacity,
                   static_cast<std::int64_t>(control.passes)};
}

/// Decides about another pass over the tiles: sets control->again and, if there is one, the condition of the graph's
/// loop. One block.
__global__ void __launch_bounds__(1024) decide(View view, bool relu, bool in_graph, cudaGraphConditionalHandle loop) {
  const int t = threadIdx.x;
  bool open = false, overflow = false;
  if (t < view.n_groups) {
    Group& group = view.group[t];
    if (group.mode == kFilter) {
      const bool fits = group.cursor <= static_cast<Count>(view.capacity);
      overflow = relu && !fits;
      if (relu || (fits && (group.cursor >= group.search.wanted || view.threshold[t] == 0 || reached(view, t))))
        group.mode = kSettled;
    }
    // Ties were counted before they were admitted: a larger number now means that a tile had other bits.
    if (group.mode == kAdmit) overflow = group.cursor > static_cast<Count>(view.capacity);
    open = group.mode != kSettled;
  }
  if (__syncthreads_or(overflow) && t == 0) {
    int g = 0;
    for (; view.group[g].cursor <= static_cast<Count>(view.capacity); ++g) {
    }
    fail(view, g, SelectionFailure::overflow);
  }
  if (__syncthreads_or(open))
    for (int g = 0; g < view.n_groups; ++g)
      if (view.group[g].mode != kSettled) advance(view, g);
  const bool unsettled = __syncthreads_or(t < view.n_groups && view.group[t].mode != kSettled) != 0;
  const bool again = unsettled && view.control->passes < kMostPasses;
  if (t == 0) {
    if (unsettled && !again) {
      int g = 0;
      while (view.group[g].mode == kSettled) ++g;
      fail(view, g, SelectionFailure::unsettled);
    }
    view.control->again = again;
    if (in_graph) cudaGraphSetConditional(loop, again);
  }
}

}  // namespace
}  // namespace weft::kernels::cuda

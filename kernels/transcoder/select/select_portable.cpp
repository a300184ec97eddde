// SPDX-License-Identifier: Apache-2.0
//
// One work item per token. Its row is read twice, to count and to write, but the tile of products is still in the
// cache and few entries pass: blocks without any are skipped after one vectorised comparison.
#include "kernels/portable.hpp"
#include "kernels/transcoder/select/select.hpp"

namespace weft::kernels {
namespace {

using HistogramTeams = Kokkos::TeamPolicy<Space>;

constexpr std::int64_t kSelectBlock = 32;  // entries compared at once
#ifdef KOKKOS_ENABLE_CUDA
constexpr int kTeamSize = 256;
int n_teams(const Space& space) { return 2 * space.cuda_device_prop().multiProcessorCount; }
#else
constexpr int kTeamSize = 1;
int n_teams(const Space& space) { return space.concurrency(); }
#endif

/// Row i of a product with its bias; T is float or bf16.
template <class T>
struct Row {
  const T* product;
  const float* bias;
  std::int64_t size;

  WEFT_HOST_DEVICE float operator[](std::int64_t j) const { return static_cast<float>(product[j]) + bias[j]; }

  /// True if any of the entries [begin, begin + kSelectBlock) reaches bound[j].
  template <class Bound>
  WEFT_HOST_DEVICE bool any_from(std::int64_t begin, const Bound& bound) const {
    int any = 0;
    if (begin + kSelectBlock <= size) {
      for (std::int64_t j = 0; j < kSelectBlock; ++j) any |= (*this)[begin + j] >= bound[begin + j];
    } else {
      for (std::int64_t j = begin; j < size; ++j) any |= (*this)[j] >= bound[j];
    }
    return any != 0;
  }
};

/// A bound that all features share.
struct OneBound {
  float value;
  WEFT_HOST_DEVICE float operator[](std::int64_t) const { return value; }
};

template <class T>
WEFT_HOST_DEVICE inline Row<T> row_of(const Tile& tile, std::int64_t i) {
  return {static_cast<const T*>(tile.product.data) + i * tile.product.stride, tile.bias.data, tile.product.columns};
}

/// Calls function with a value of the product's type.
template <class Function>
void with_type(const Tile& tile, Function&& function) {
  if (tile.product.type == Scalar::bf16)
    function(bf16{});
  else
    function(float{});
}

/// bound[j]: the value that feature j of the tile must exceed; equal to the filter's threshold where ties are admitted.
template <class T, class Bound>
void filter_rows(const Execution& execution, const Tile tile, std::int64_t block, const Filter filter,
                 const CandidateLists lists, const Bound bound) {
  const Space space = space_of(execution);
  const std::int64_t n_rows = tile.product.rows;
  const std::int64_t first_segment = lists.segment(tile.layer, block, tile.token_begin);
  const float threshold = bits_float(filter.threshold);
  const bool ordered = filter.admit.data != nullptr;
  for_all(
      execution, "filter: count", n_rows, KOKKOS_LAMBDA(std::int64_t i) {
        const Row<T> row = row_of<T>(tile, i);
        std::int32_t count = 0;
        for (std::int64_t j = 0; j < row.size; ++j) count += row[j] > bound[j];
        if (ordered) {
          const std::int64_t token = tile.token_begin + i;
          const std::int32_t room = filter.admit(token, tile.layer) - filter.admitted(token, tile.layer);
          std::int32_t ties = 0;
          if (room > 0)
            for (std::int64_t j = 0; j < row.size; ++j) ties += row[j] == threshold;
          count += ties < room ? ties : room;
        }
        lists.segment_begin[first_segment + 1 + i] = count;
      });
  offsets_from_counts(space, lists.segment_begin.data + first_segment, n_rows);
  for_all(
      execution, "filter: write", n_rows, KOKKOS_LAMBDA(std::int64_t i) {
        const Row<T> row = row_of<T>(tile, i);
        std::int64_t to = lists.segment_begin[first_segment + i];
        const std::int64_t end = lists.segment_begin[first_segment + i + 1];
        const std::int64_t token = tile.token_begin + i;
        std::int32_t room = ordered ? filter.admit(token, tile.layer) - filter.admitted(token, tile.layer) : 0;
        const std::int64_t base = tile.layer * lists.n_features + tile.feature_begin;
        for (std::int64_t begin = 0; begin < row.size && to < end; begin += kSelectBlock) {
          if (!row.any_from(begin, bound)) continue;
          const std::int64_t last = begin + kSelectBlock < row.size ? begin + kSelectBlock : row.size;
          for (std::int64_t j = begin; j < last; ++j) {
            const float r = row[j];
            if (!(r > bound[j])) {
              if (room <= 0 || r != threshold) continue;
              --room;
            }
            if (to < lists.key.size) {
              lists.key[to] = static_cast<std::uint32_t>(base + j);
              lists.value[to] = r;
            }
            ++to;
          }
        }
        if (ordered) filter.admitted(token, tile.layer) = filter.admit(token, tile.layer) - room;
      });
}

/// A team's own histogram, added to the common one at the end.
struct TeamHistogram {
  std::uint32_t* bins;

  WEFT_HOST_DEVICE void add(int bin) const {
    if (bin < 0) return;
#ifdef __CUDA_ARCH__
    Kokkos::atomic_inc(&bins[bin]);
#else
    ++bins[bin];  // a team has one thread
#endif
  }
};

template <class Member>
KOKKOS_INLINE_FUNCTION TeamHistogram open_histogram(const Member& team) {
  const TeamHistogram own{
      static_cast<std::uint32_t*>(team.team_shmem().get_shmem(kHistogramBins * sizeof(std::uint32_t)))};
  Kokkos::parallel_for(Kokkos::TeamThreadRange(team, kHistogramBins), [&](int b) { own.bins[b] = 0; });
  team.team_barrier();
  return own;
}

template <class Member>
KOKKOS_INLINE_FUNCTION void close_histogram(const Member& team, const TeamHistogram& own,
                                            const Array<std::int64_t>& sum) {
  team.team_barrier();
  Kokkos::parallel_for(Kokkos::TeamThreadRange(team, kHistogramBins), [&](int b) {
    if (own.bins[b] != 0) Kokkos::atomic_add(&sum[b], static_cast<std::int64_t>(own.bins[b]));
  });
}

HistogramTeams histogram_policy(const Space& space) {
  return HistogramTeams(space, n_teams(space), kTeamSize)
      .set_scratch_size(0, Kokkos::PerTeam(kHistogramBins * sizeof(std::uint32_t)));
}

template <class T>
void histogram_rows(const Execution& execution, const Tile tile, HistogramRound round, Array<std::int64_t> histogram) {
  const std::int64_t n_rows = tile.product.rows;
  Kokkos::parallel_for(
      "histogram of a tile", histogram_policy(space_of(execution)),
      KOKKOS_LAMBDA(const HistogramTeams::member_type& team) {
        const TeamHistogram own = open_histogram(team);
        for (std::int64_t i = team.league_rank(); i < n_rows; i += team.league_size()) {
          const Row<T> row = row_of<T>(tile, i);
          Kokkos::parallel_for(Kokkos::TeamThreadRange(team, row.size),
                               [&](std::int64_t j) { own.add(round.bin(selection_key(row[j]))); });
        }
        close_histogram(team, own, histogram);
      });
}

template <class T>
void count_tied_rows(const Execution& execution, const Tile tile, std::uint32_t key, Matrix<std::int32_t> ties) {
  const float value = bits_float(key);
  for_all(
      execution, "count ties of a tile", tile.product.rows, KOKKOS_LAMBDA(std::int64_t i) {
        const Row<T> row = row_of<T>(tile, i);
        std::int32_t count = 0;
        for (std::int64_t j = 0; j < row.size; ++j) count += row[j] == value;
        ties(tile.token_begin + i, tile.layer) += count;
      });
}

/// Restores the heap (least word in front) of n words after its first one was replaced.
WEFT_HOST_DEVICE inline void sift_down(std::uint64_t* heap, std::int64_t n) {
  std::int64_t root = 0;
  const std::uint64_t word = heap[0];
  for (std::int64_t child = 1; child < n; child = 2 * root + 1) {
    if (child + 1 < n && heap[child + 1] < heap[child]) ++child;
    if (word <= heap[child]) break;
    heap[root] = heap[child];
    root = child;
  }
  heap[root] = word;
}

/// Sorts n words, ascending.
WEFT_HOST_DEVICE inline void sort_words(std::uint64_t* words, std::int64_t n) {
  if (n <= 32) {
    for (std::int64_t i = 1; i < n; ++i) {
      const std::uint64_t word = words[i];
      std::int64_t j = i;
      for (; j > 0 && word < words[j - 1]; --j) words[j] = words[j - 1];
      words[j] = word;
    }
    return;
  }
  // Heap sort of complements, because the heap has the least word in front: moving the front to the end repeatedly
  // sorts ascending.
  for (std::int64_t i = 0; i < n; ++i) words[i] = ~words[i];
  for (std::int64_t i = 1; i < n; ++i)
    for (std::int64_t child = i, parent = (i - 1) / 2; child > 0 && words[child] < words[parent];
         child = parent, parent = (parent - 1) / 2) {
      const std::uint64_t keep = words[child];
      words[child] = words[parent];
      words[parent] = keep;
    }
  for (std::int64_t last = n - 1; last > 0; --last) {
    const std::uint64_t front = words[0];
    words[0] = words[last];
    words[last] = front;
    sift_down(words, last);
  }
  for (std::int64_t i = 0; i < n; ++i) words[i] = ~words[i];
}

template <class T>
void keep_best_rows(const Execution& execution, const Tile tile, const BestLists best) {
  const std::int64_t group = best.n_groups == 1 ? 0 : tile.layer;
  for_all(
      execution, "keep best", tile.product.rows, KOKKOS_LAMBDA(std::int64_t i) {
        const Row<T> row = row_of<T>(tile, i);
        std::uint64_t* heap = best.word.row((tile.token_begin + i) * best.n_groups + group);
        const std::int64_t base = tile.layer * best.n_features_total + best.feature_offset + tile.feature_begin;
        float least = bits_float(key_of_word(heap[0]));
        for (std::int64_t begin = 0; begin < row.size; begin += kSelectBlock) {
          if (!row.any_from(begin, OneBound{least})) continue;
          const std::int64_t last = begin + kSelectBlock < row.size ? begin + kSelectBlock : row.size;
          for (std::int64_t j = begin; j < last; ++j) {
            const float r = row[j];
            if (!(r > least)) continue;
            heap[0] = selection_word(float_bits(r), static_cast<std::uint32_t>(base + j));
            sift_down(heap, best.word.columns);
            least = bits_float(key_of_word(heap[0]));
          }
        }
      });
}

}  // namespace

void filter_tile(const Execution& execution, const Tile& tile, std::int64_t block, const Filter& filter,
                 const CandidateLists& lists) {
  with_type(tile, [&](auto type) {
    if (tile.bounds.data != nullptr)
      filter_rows<decltype(type)>(execution, tile, block, filter, lists, tile.bounds);
    else
      filter_rows<decltype(type)>(execution, tile, block, filter, lists, OneBound{bits_float(filter.threshold)});
  });
}

void histogram_tile(const Execution& execution, const Tile& tile, HistogramRound round, Array<std::int64_t> histogram) {
  with_type(tile, [&](auto type) { histogram_rows<decltype(type)>(execution, tile, round, histogram); });
}

void count_ties_tile(const Execution& execution, const Tile& tile, std::uint32_t key, Matrix<std::int32_t> ties) {
  with_type(tile, [&](auto type) { count_tied_rows<decltype(type)>(execution, tile, key, ties); });
}

void histogram_candidates(const Execution& execution, const CandidateLists& candidates, std::int64_t layer_begin,
                          std::int64_t layer_end, HistogramRound round, Array<std::int64_t> histogram) {
  const CandidateLists lists = candidates;
  const std::int64_t first = lists.segment(layer_begin, 0, 0), last = lists.segment(layer_end, 0, 0);
  Kokkos::parallel_for(
      "histogram of candidates", histogram_policy(space_of(execution)),
      KOKKOS_LAMBDA(const HistogramTeams::member_type& team) {
        const std::int64_t begin = lists.segment_begin[first], n = lists.segment_begin[last] - begin;
        const std::int64_t own_begin = begin + n * team.league_rank() / team.league_size();
        const std::int64_t own_end = begin + n * (team.league_rank() + 1) / team.league_size();
        const TeamHistogram own = open_histogram(team);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own_begin, own_end),
                             [&](std::int64_t i) { own.add(round.bin(float_bits(lists.value[i]))); });
        close_histogram(team, own, histogram);
      });
}

void count_ties(const Execution& execution, const CandidateLists& candidates, Array<const std::uint32_t> threshold,
                Matrix<std::int32_t> ties) {
  const CandidateLists lists = candidates;
  for_all(
      execution, "count ties", lists.n_tokens * lists.n_layers, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / lists.n_layers, layer = i % lists.n_layers;
        std::int32_t count = 0;
        for (std::int64_t block = 0; block < lists.n_blocks; ++block) {
          const std::int64_t segment = lists.segment(layer, block, token);
          for (std::int64_t c = lists.segment_begin[segment]; c < lists.segment_begin[segment + 1]; ++c)
            count += float_bits(lists.value[c]) == threshold[layer];
        }
        ties(token, layer) = count;
      });
}

void take_candidates(const Execution& execution, const CandidateLists& candidates, Array<const std::uint32_t> threshold,
                     Matrix<const std::int32_t> admit, const SparseActivations& activations) {
  const Space space = space_of(execution);
  const CandidateLists lists = candidates;
  const SparseActivations out = activations;
  // The first pass counts, the second writes.
  for (const bool write : {false, true}) {
    for_all(
        execution, "take candidates", lists.n_tokens + 1, KOKKOS_LAMBDA(std::int64_t row) {
          if (row == 0) {
            if (!write) out.row_offsets[0] = 0;
            return;
          }
          const std::int64_t token = row - 1;
          std::int64_t to = write ? out.row_offsets[token] : 0;
          for (std::int64_t layer = 0; layer < lists.n_layers; ++layer) {
            const std::uint32_t least = threshold[layer];
            std::int32_t room = admit.data == nullptr ? 0x7fffffff : admit(token, layer);
            for (std::int64_t block = 0; block < lists.n_blocks; ++block) {
              const std::int64_t segment = lists.segment(layer, block, token);
              for (std::int64_t c = lists.segment_begin[segment]; c < lists.segment_begin[segment + 1]; ++c) {
                const std::uint32_t key = float_bits(lists.value[c]);
                if (key < least || (key == least && room-- <= 0)) continue;
                if (write) {
                  out.key[to] = lists.key[c];
                  out.value[to] = lists.value[c];
                }
                ++to;
              }
            }
          }
          if (!write) out.row_offsets[row] = to;
        });
    if (!write) offsets_from_counts(space, out.row_offsets.data, lists.n_tokens);
  }
}

void keep_best_tile(const Execution& execution, const Tile& tile, const BestLists& best) {
  with_type(tile, [&](auto type) { keep_best_rows<decltype(type)>(execution, tile, best); });
}

void merge_best(const Execution& execution, Matrix<std::uint64_t> words, std::int64_t n_lists,
                Array<std::uint64_t> cut_off) {
  const std::int64_t n_rows = cut_off.size;
  for_all(
      execution, "merge best", n_rows, KOKKOS_LAMBDA(std::int64_t row) {
        std::uint64_t* heap = words.row(row);
        for (std::int64_t list = 1; list < n_lists; ++list) {
          const std::uint64_t* other = words.row(list * n_rows + row);
          for (std::int64_t i = 0; i < words.columns; ++i)
            if (other[i] > heap[0]) {
              heap[0] = other[i];
              sift_down(heap, words.columns);
            }
        }
        cut_off[row] = heap[0];
      });
}

void take_best(const Execution& execution, const BestLists& lists, Array<const std::uint64_t> cut_off,
               const SparseActivations& activations) {
  const Space space = space_of(execution);
  const BestLists best = lists;
  const SparseActivations out = activations;
  for_all(
      execution, "take best: count", out.n_tokens + 1, KOKKOS_LAMBDA(std::int64_t i) {
        std::int64_t count = 0;
        if (i > 0)
          for (std::int64_t row = (i - 1) * best.n_groups; row < i * best.n_groups; ++row) {
            const std::uint64_t least = cut_off.data != nullptr && cut_off[row] > 0 ? cut_off[row] : 1;
            for (std::int64_t j = 0; j < best.word.columns; ++j) count += best.word(row, j) >= least;
          }
        out.row_offsets[i] = count;
      });
  offsets_from_counts(space, out.row_offsets.data, out.n_tokens);
  for_all(
      execution, "take best: write", out.n_tokens, KOKKOS_LAMBDA(std::int64_t token) {
        std::int64_t to = out.row_offsets[token];
        for (std::int64_t row = token * best.n_groups; row < (token + 1) * best.n_groups; ++row) {
          const std::uint64_t least = cut_off.data != nullptr && cut_off[row] > 0 ? cut_off[row] : 1;
          std::uint64_t* words = best.word.row(row);
          std::int64_t n = 0;
          for (std::int64_t j = 0; j < best.word.columns; ++j)
            if (words[j] >= least) {
              // Words are sorted ascending by index, followed by the key.
              words[n++] = static_cast<std::uint64_t>(index_of_word(words[j])) << 32 | key_of_word(words[j]);
            }
          sort_words(words, n);
          for (std::int64_t j = 0; j < n; ++j, ++to) {
            const std::int64_t index = static_cast<std::int64_t>(words[j] >> 32);
            const std::int64_t layer = index / best.n_features_total;
            const std::int64_t feature = index % best.n_features_total - best.feature_offset;
            out.key[to] = static_cast<std::uint32_t>(layer * out.n_features + feature);
            out.value[to] = bits_float(static_cast<std::uint32_t>(words[j]));
          }
        }
      });
}

}  // namespace weft::kernels

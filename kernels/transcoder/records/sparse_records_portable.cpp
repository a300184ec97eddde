// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "kernels/bf16.hpp"
#include "kernels/lower_bound.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/records/sparse_records.hpp"

namespace weft::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct EntryRange {
  std::int64_t begin, end;
};
/// The entries of a token in a layer. Within a token they ascend by layer.
KOKKOS_FORCEINLINE_FUNCTION EntryRange entries_of(const SparseActivations& list, std::int64_t token,
                                                  std::int64_t layer) {
  const auto first_from = [&](std::int64_t key) {
    return lower_bound(list.key, list.row_offsets[token], list.row_offsets[token + 1], key);
  };
  return {first_from(layer * list.n_features), first_from((layer + 1) * list.n_features)};
}

KOKKOS_FORCEINLINE_FUNCTION double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

}  // namespace

void screen_rows(const Execution& execution, AnyMatrix inputs, AnyMatrix targets, Array<std::int32_t> flags) {
  for_teams(
      execution, "screen_rows", inputs.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        auto& buffer = scratch<float[kChunkColumns]>(team);
        const std::int64_t row = team.league_rank();
        int bad = 0;
        const auto count_bad = [&](const AnyMatrix& rows) {
          for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
            const float* values = row_chunk(team, rows, row, column, count, buffer);
            bad += sum_columns<int>(team, count, [&](int c) { return is_finite(values[c]) ? 0 : 1; });
            team.team_barrier();
          });
        };
        const auto clear = [&](const AnyMatrix& rows) {
          for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
            store_chunk(team, rows, row, column, count, [](int) { return 0.0f; });
          });
        };
        count_bad(inputs);
        count_bad(targets);
        if (bad > 0) {
          clear(inputs);
          clear(targets);
        }
        once(team, [&] { flags[row] = bad > 0 ? 1 : 0; });
      });
}

void row_squares(const Execution& execution, AnyMatrix rows, bool to_end, Matrix<double> squares) {
  const std::int64_t n_layers = squares.rows, d = rows.columns / n_layers;
  for_teams(
      execution, "row_squares", rows.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        auto& buffer = scratch<float[kChunkColumns]>(team);
        const std::int64_t row = team.league_rank();
        double all = 0, later = 0;
        for (std::int64_t layer = n_layers; layer-- > 0;) {
          double sum = 0;
          for_chunks(d, d, [&](std::int64_t column, int count) {
            const float* values = row_chunk(team, rows, row, layer * d + column, count, buffer);
            sum += sum_columns<double>(team, count, [&](int c) { return square(values[c]); });
            team.team_barrier();
          });
          all += sum;
          later = to_end ? later + sum : sum;
          once(team, [&] { squares(layer, row) = later; });
        }
        if (all <= 1e300) return;
        for_chunks(rows.columns, rows.columns, [&](std::int64_t column, int count) {
          store_chunk(team, rows, row, column, count, [](int) { return 0.0f; });
        });
        once(team, [&] {
          for (std::int64_t layer = 0; layer < n_layers; ++layer) squares(layer, row) = kInfinity;
        });
      });
}

void band_gradients(const Execution& execution, const ThresholdBand& of_step, const SparseActivations& listed,
                    Matrix<const float> theta, Array<const float> alpha, Array<float> dz, Array<float> by_threshold) {
  const ThresholdBand band = of_step;
  const SparseActivations list = listed;
  for_all(
      execution, "band_gradients", list.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i >= list.row_offsets[list.n_tokens]) return;
        const std::int64_t layer = list.key[i] / list.n_features;
        const float threshold = theta(layer, list.key[i] - layer * list.n_features), z = list.value[i];
        const JumpRule rule = band.now();
        dz[i] = jump_is_active(rule, z, threshold) ? alpha[i] : 0.0f;
        by_threshold[i] = jump_factor(rule, z, threshold) * alpha[i];
      });
}

void entry_squares(const Execution& execution, const SparseActivations& of, Array<const float> v, Array<const float> w,
                   Matrix<const double> of_rows, double constant, Matrix<double> squares) {
  const SparseActivations list = of;
  for_all(
      execution, "entry_squares", list.n_tokens * list.n_layers, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / list.n_layers, layer = i % list.n_layers;
        const EntryRange entries = entries_of(list, token, layer);
        double sum = 0, others = 0;
        for (std::int64_t entry = entries.begin; entry < entries.end; ++entry) {
          sum += square(v[entry]);
          if (w.data != nullptr) others += square(w[entry]);
        }
        squares(layer, token) = (sum > 0 ? sum * (of_rows(layer, token) + constant) : sum) + others;
      });
}

void shared_entry_squares(const Execution& execution, const SparseActivations& of, const FeatureHits& of_hits,
                          Array<const std::int64_t> source_offsets, Array<const float> v, Array<const float> w,
                          AnyMatrix rows, bool to_end, double constant, Array<const std::int32_t> record,
                          Array<const std::int64_t> record_offsets, Array<double> by_position, Matrix<double> squares) {
  const SparseActivations list = of;
  const FeatureHits hits = of_hits;
  const std::int64_t d = rows.columns / list.n_layers, n_features = list.n_features;
  struct Buffers {
    float sum[kChunkColumns], row[kChunkColumns];
  };
  for_teams(
      execution, "shared_entry_squares", list.n_layers * n_features, sizeof(Buffers), KOKKOS_LAMBDA(const Team& team) {
        Buffers& buffer = scratch<Buffers>(team);
        const std::int64_t key = team.league_rank(), layer = key / n_features;
        const std::int64_t first_column = layer * d, columns = to_end ? rows.columns - first_column : d;
        // Hits ascend by token in each of these runs.
        const std::int64_t runs = source_offsets.size > 0 ? layer + 1 : 1;
        const auto size_of = [&](std::int64_t run) {
          if (source_offsets.size == 0) return hits.offsets[key + 1] - hits.offsets[key];
          const std::int64_t source = run * n_features + key - layer * n_features;
          return source_offsets[source + 1] - source_offsets[source];
        };
        const auto first_of_record = [&](std::int64_t begin, std::int64_t end, std::int64_t b) {
          return lower_bound(hits.token, begin, end, record_offsets[b]);
        };
        const auto is_of_record = [&](std::int64_t hit, std::int64_t end, std::int64_t b) {
          return hit < end && static_cast<std::int64_t>(hits.token[hit]) < record_offsets[b + 1];
        };
        for (std::int64_t run = 0, begin = hits.offsets[key]; run < runs; begin += size_of(run), ++run)
          for (std::int64_t hit = begin, end = begin + size_of(run), next = hit; hit < end; hit = next) {
            const std::int32_t b = record[hits.token[hit]];
            for (next = hit; next < end && record[hits.token[next]] == b; ++next)
              once(team, [&] { by_position[hits.position[next]] = 0; });
            if (b < 0) continue;
            bool counted = false;  // with an earlier run
            for (std::int64_t other = 0, at = hits.offsets[key]; other < run; at += size_of(other), ++other)
              counted = counted || is_of_record(first_of_record(at, at + size_of(other), b), at + size_of(other), b);
            if (counted) continue;
            const auto for_each_hit = [&](const auto& body) {
              for (std::int64_t other = run, at = begin; other < runs; at += size_of(other), ++other)
                for (std::int64_t i = first_of_record(at, at + size_of(other), b);
                     is_of_record(i, at + size_of(other), b); ++i)
                  body(i);
            };
            double of_v = 0, of_w = 0;
            for_each_hit([&](std::int64_t i) {
              of_v += static_cast<double>(v[hits.position[i]]);
              if (w.data != nullptr) of_w += static_cast<double>(w[hits.position[i]]);
            });
            double sum = constant * of_v * of_v + of_w * of_w;
            for_chunks(columns, columns, [&](std::int64_t column, int count) {
              for_columns(team, count, [&](int c) { buffer.sum[c] = 0.0f; });
              for_each_hit([&](std::int64_t i) {
                const float value = v[hits.position[i]];
                const float* row = row_chunk(team, rows, hits.token[i], first_column + column, count, buffer.row);
                for_columns(team, count, [&](int c) { buffer.sum[c] += value * row[c]; });
              });
              sum += sum_columns<double>(team, count, [&](int c) { return square(buffer.sum[c]); });
            });
            once(team, [&] { by_position[hits.position[hit]] = sum; });
          }
      });
  for_all(
      execution, "shared_entry_squares: tokens", list.n_tokens * list.n_layers, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / list.n_layers, of_layer = i % list.n_layers;
        const EntryRange entries = entries_of(list, token, of_layer);
        double sum = 0;
        for (std::int64_t entry = entries.begin; entry < entries.end; ++entry) sum += by_position[entry];
        squares(of_layer, token) = sum;
      });
}

void add_token_squares(const Execution& execution, Matrix<const double> squares,
                       Array<const std::int64_t> record_offsets, Matrix<double> norms) {
  const std::int64_t records = record_offsets.size - 1, n_layers = squares.rows;
  const bool apart = norms.rows == n_layers;
  for_all(
      execution, "add_token_squares", records * norms.rows, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t part = i / records, b = i % records;
        double sum = 0;
        for (std::int64_t layer = apart ? part : 0; layer < (apart ? part + 1 : n_layers); ++layer)
          for (std::int64_t token = record_offsets[b]; token < record_offsets[b + 1]; ++token)
            sum += squares(layer, token);
        norms(part, b) += sum;
      });
}

void scale_entries(const Execution& execution, const SparseActivations& of, Array<const std::int32_t> record,
                   Matrix<const float> factors, Array<float> values) {
  const SparseActivations list = of;
  for_all(
      execution, "scale_entries", list.n_tokens * list.n_layers, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / list.n_layers, layer = i % list.n_layers;
        const EntryRange entries = entries_of(list, token, layer);
        const float factor = record[token] < 0 ? 0.0f : factors(factors.rows == 1 ? 0 : layer, record[token]);
        for (std::int64_t entry = entries.begin; entry < entries.end; ++entry)
          values[entry] = factor == 0.0f ? 0.0f : factor * values[entry];
      });
}

void clipped_column_sums(const Execution& execution, AnyMatrix rows, Array<const std::int32_t> record,
                         Array<const float> factors, Array<float> partial, Array<float> out) {
  const std::int64_t columns = rows.columns, chunks = (columns + kChunkColumns - 1) / kChunkColumns,
                     sums = partial_sums(rows.rows);
  struct Buffers {
    float sum[kChunkColumns], row[kChunkColumns];
  };
  for_teams(
      execution, "clipped_column_sums", sums * chunks, sizeof(Buffers), KOKKOS_LAMBDA(const Team& team) {
        Buffers& buffer = scratch<Buffers>(team);
        const std::int64_t of = team.league_rank() / chunks, column = team.league_rank() % chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, columns - column);
        const std::int64_t begin = of * kRowsPerPartialSum,
                           end = begin + smaller(kRowsPerPartialSum, rows.rows - begin);
        for_columns(team, count, [&](int c) { buffer.sum[c] = 0.0f; });
        for (std::int64_t n = begin; n < end; ++n) {
          const float factor = record[n] < 0 ? 0.0f : factors[record[n]];
          if (factor == 0.0f) continue;
          const float* row = row_chunk(team, rows, n, column, count, buffer.row);
          for_columns(team, count, [&](int c) { buffer.sum[c] += factor * row[c]; });
        }
        for_columns(team, count, [&](int c) { partial[of * columns + column + c] = buffer.sum[c]; });
      });
  for_all(
      execution, "clipped_column_sums: total", columns, KOKKOS_LAMBDA(std::int64_t c) {
        float sum = 0;
        for (std::int64_t of = 0; of < sums; ++of) sum += partial[of * columns + c];
        out[c] = sum;
      });
}

void exclude_records(const Execution& execution, Array<const std::int32_t> flags, std::int64_t first,
                     Array<const std::int32_t> record, Array<double> norms) {
  // Several tokens of a record write the same value.
  for_all(
      execution, "exclude_records", flags.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (flags[i] != 0 && record[first + i] >= 0) norms[record[first + i]] = kInfinity;
      });
}

}  // namespace weft::kernels

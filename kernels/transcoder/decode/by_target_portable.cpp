// SPDX-License-Identifier: Apache-2.0
#include "kernels/lower_bound.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/decode/by_target.hpp"

namespace weft::kernels {

void lists_by_target(const Execution& execution, const SparseActivations& of_entries, const PairAffine& affine,
                     SparseActivations out, Array<std::int64_t> begin) {
  const SparseActivations of = of_entries;
  const std::int64_t n_layers = of.n_layers, n_features = of.n_features;
  std::int64_t* const start = begin.data;
  // Counts, for each token and target, the entries of sources up to the target: the first entries of the token.
  for_all(
      execution, "lists_by_target: count", of.n_tokens * n_layers, KOKKOS_LAMBDA(std::int64_t row) {
        const std::int64_t token = row / n_layers, past = (row % n_layers + 1) * n_features;
        const std::int64_t first = of.row_offsets[token];
        start[row + 1] = lower_bound(of.key, first, of.row_offsets[token + 1], past) - first;
        if (row == 0) start[0] = 0;
      });
  offsets_from_counts(space_of(execution), start, of.n_tokens * n_layers);
  for_all(
      execution, "lists_by_target: fill", of.n_tokens * n_layers, KOKKOS_LAMBDA(std::int64_t row) {
        const std::int64_t token = row / n_layers, target = row % n_layers, first = of.row_offsets[token];
        for (std::int64_t i = 0; i < start[row + 1] - start[row]; ++i) {
          const std::int64_t source = of.key[first + i] / n_features, f = of.key[first + i] - source * n_features;
          float value = of.value[first + i];
          if (affine.scale.data != nullptr) {
            const std::int64_t pair = pair_of(source, target, n_layers);
            value = (value + affine.offset(pair, f)) * affine.scale(pair, f);
          }
          out.key[start[row] + i] = static_cast<std::uint32_t>(target * n_features + f);
          out.value[start[row] + i] = value;
        }
        if (target == 0) out.row_offsets[token] = start[row];
        if (row == of.n_tokens * n_layers - 1) out.row_offsets[of.n_tokens] = start[row + 1];
      });
}

void hits_by_target(const Execution& execution, const SparseActivations& of_entries, const FeatureHits& of_hits,
                    Array<const std::int64_t> begin, FeatureHits out) {
  const SparseActivations of = of_entries;
  const FeatureHits hits = of_hits;
  const std::int64_t n_layers = of.n_layers, n_features = of.n_features;
  for_all(
      execution, "hits_by_target: count", n_layers * n_features, KOKKOS_LAMBDA(std::int64_t key) {
        std::int64_t count = 0;
        for (std::int64_t from = key % n_features; from <= key; from += n_features)
          count += hits.offsets[from + 1] - hits.offsets[from];
        out.offsets[key + 1] = count;
        if (key == 0) out.offsets[0] = 0;
      });
  offsets_from_counts(space_of(execution), out.offsets.data, n_layers * n_features);
  for_all(
      execution, "hits_by_target: fill", n_layers * n_features, KOKKOS_LAMBDA(std::int64_t key) {
        const std::int64_t target = key / n_features;
        std::int64_t at = out.offsets[key];
        for (std::int64_t from = key % n_features; from <= key; from += n_features)
          for (std::int64_t hit = hits.offsets[from]; hit < hits.offsets[from + 1]; ++hit, ++at) {
            const std::int64_t token = hits.token[hit], i = hits.position[hit] - of.row_offsets[token];
            out.token[at] = static_cast<std::uint32_t>(token);
            out.position[at] = static_cast<std::uint32_t>(begin[token * n_layers + target] + i);
          }
      });
}

void gradient_by_source(const Execution& execution, const SparseActivations& of_entries, const PairAffine& affine,
                        Array<const std::int64_t> begin, Array<const float> delta, Array<float> activation_gradient) {
  const SparseActivations of = of_entries;
  const std::int64_t n_layers = of.n_layers, n_features = of.n_features;
  for_all(
      execution, "gradient_by_source", of.n_tokens * n_layers, KOKKOS_LAMBDA(std::int64_t row) {
        const std::int64_t token = row / n_layers, source = row % n_layers, first = of.row_offsets[token];
        // The list of a target contains all entries of the sources up to it.
        const std::int64_t past = first + begin[row + 1] - begin[row];
        for (std::int64_t i = source == 0 ? first : first + begin[row] - begin[row - 1]; i < past; ++i) {
          const std::int64_t f = of.key[i] - source * n_features;
          float sum = 0.0f;
          for (std::int64_t target = source; target < n_layers; ++target) {
            const float part = delta[begin[token * n_layers + target] + i - first];
            sum += affine.scale.data == nullptr ? part : affine.scale(pair_of(source, target, n_layers), f) * part;
          }
          activation_gradient[i] = sum;
        }
      });
}

void affine_gradient(const Execution& execution, const SparseActivations& of_entries, const FeatureHits& of_hits,
                     const PairAffine& affine, Array<const std::int64_t> begin, Array<const float> delta,
                     const PairAffine& gradient) {
  const SparseActivations of = of_entries;
  const FeatureHits hits = of_hits;
  const std::int64_t n_layers = of.n_layers, n_features = of.n_features;
  for_all(
      execution, "affine_gradient", n_layers * n_features, KOKKOS_LAMBDA(std::int64_t key) {
        const std::int64_t source = key / n_features, f = key % n_features;
        for (std::int64_t target = source; target < n_layers; ++target) {
          const std::int64_t pair = pair_of(source, target, n_layers);
          double of_offset = 0, of_scale = 0;
          for (std::int64_t hit = hits.offsets[key]; hit < hits.offsets[key + 1]; ++hit) {
            const std::int64_t token = hits.token[hit], position = hits.position[hit];
            const float d = delta[begin[token * n_layers + target] + position - of.row_offsets[token]];
            of_offset += static_cast<double>(affine.scale(pair, f) * d);
            of_scale += static_cast<double>((of.value[position] + affine.offset(pair, f)) * d);
          }
          gradient.offset(pair, f) = static_cast<float>(of_offset);
          gradient.scale(pair, f) = static_cast<float>(of_scale);
        }
      });
}

void scale_each_row(const Execution& execution, Array<const float> scale, Matrix<float> rows) {
  for_all(
      execution, "scale_rows", rows.rows, KOKKOS_LAMBDA(std::int64_t i) {
        for (std::int64_t j = 0; j < rows.columns; ++j) rows(i, j) *= scale[i];
      });
}

void norms_of_features(const Execution& execution, std::int64_t n_layers, Array<float> norm) {
  const std::int64_t n_features = norm.size / n_layers;
  for_all(
      execution, "norms_of_features", n_features, KOKKOS_LAMBDA(std::int64_t f) {
        double sum = 0;
        for (std::int64_t key = (n_layers - 1) * n_features + f; key >= 0; key -= n_features) {
          sum += static_cast<double>(norm[key]) * static_cast<double>(norm[key]);
          norm[key] = static_cast<float>(sqrt(sum));
        }
      });
}

void factors_of_rows(const Execution& execution, std::int64_t n_layers, Array<float> factor) {
  const std::int64_t n_features = factor.size / n_layers;
  for_all(
      execution, "factors_of_rows", n_features, KOKKOS_LAMBDA(std::int64_t f) {
        double sum = 0;
        for (std::int64_t key = f; key < n_layers * n_features; key += n_features) {
          sum += static_cast<double>(factor[key]);
          factor[key] = static_cast<float>(sum);
        }
      });
}

}  // namespace weft::kernels

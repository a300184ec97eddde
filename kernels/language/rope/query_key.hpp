// SPDX-License-Identifier: Apache-2.0
//
// What happens to queries and keys between their projection and the attention, in one pass over the packed projection
// [rows, (heads + 2 kv_heads) * head_size] = [queries | keys | values]: normalisation, then rotary positions.
//
//   none     q
//   head     weight[j] * q_j / sqrt(mean over the head of q^2 + epsilon)      one weight [head_size] for all heads
//   width    the same with the mean over all heads, weight [heads * head_size]
//   scaled   sqrt(head_size) * q / |q|; keys also times the temperature tau, a parameter
//
// Rotary positions (Su et al. 2021) rotate the pairs (j, j + r / 2) of the first r columns of a head by position *
// base^(-2 j / r): the halves form of Llama and GPT-NeoX in the transformers library. The other columns of the head,
// and the values, pass unchanged.
#pragma once

#include <vector>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

enum class QueryKeyNorm : int { none, head, width, scaled };

struct QueryKey {
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;
  QueryKeyNorm norm = QueryKeyNorm::none;
  float epsilon = 1e-6f;
  Array<const float> query_weight, key_weight;  ///< head: [head_size]; width: [heads or kv_heads * head_size]
  const float* temperature = nullptr;           ///< scaled: [1], where the kernels run
  /// [longest, rotated()]: cosines of the first half of a row, sines of the second (`rotary_table`). Empty: no
  /// rotation.
  Array<const float> rotary;
  std::int64_t rotary_columns = 0;  ///< of a head, the first; 0: all
  /// Position of each row, [rows]; where the kernels run.
  Array<const std::int32_t> positions;

  /// Columns of a head that are rotated.
  WEFT_HOST_DEVICE std::int64_t rotated() const {
    return rotary.data == nullptr ? 0 : rotary_columns > 0 ? rotary_columns : head_size;
  }
  WEFT_HOST_DEVICE std::int64_t query_columns() const { return heads * head_size; }
  WEFT_HOST_DEVICE std::int64_t key_columns() const { return kv_heads * head_size; }
  WEFT_HOST_DEVICE std::int64_t columns() const { return (heads + 2 * kv_heads) * head_size; }
  /// Inverse norms kept per row.
  WEFT_HOST_DEVICE std::int64_t inverses_per_row() const {
    return norm == QueryKeyNorm::none ? 0 : norm == QueryKeyNorm::width ? 2 : heads + kv_heads;
  }
};

/// How wavelengths are made longer for contexts longer than those of the training.
///
///   bands     those above length / low are multiplied by `factor`, those below length / high are not; between them the
///             frequency f becomes (1 - s) f / factor + s f with s = (length / wavelength - low) / (high - low)
///             (Llama 3.1, 2024). length = 0: all are multiplied (position interpolation, Chen et al. 2023)
///   yarn      the same with s falling from 1 to 0 between the whole pairs of columns around those of the wavelengths
///             length / high and length / low (Peng et al. 2023)
///   dynamic   in sequences of n > length tokens the base is multiplied by (factor n / length - factor + 1)^(r / (r -
///   2)) longrope  they are multiplied by short_factors, in sequences of more than `length` tokens by long_factors
///   (Ding et
///             al. 2024)
enum class RopeMethod : int { bands, yarn, dynamic, longrope };

struct RopeScaling {
  double factor = 1;        ///< 1: none
  std::int64_t length = 0;  ///< of the contexts of the training
  double low = 1, high = 4;
  RopeMethod method = RopeMethod::bands;
  /// Cosines and sines are multiplied by this. 0: yarn 0.1 ln(factor) + 1, longrope sqrt(1 + ln(factor) / ln(length)),
  /// others 1.
  double amplitude = 0;
  std::vector<double> short_factors = {}, long_factors = {};  ///< longrope: one per pair of columns

  /// True if the table depends on the length of the sequences.
  bool depends_on_length() const { return method == RopeMethod::dynamic || method == RopeMethod::longrope; }
};

/// The rotary table of sequences of `longest` tokens, on the host, in fp64 rounded once: [longest, columns].
void rotary_table(double base, const RopeScaling&, std::int64_t columns, std::int64_t longest, float* table);

/// packed -> out, both [rows, columns()]; out may be packed when norm is none. inverse: [rows, inverses_per_row()].
WEFT_KERNEL(query_key, void(const Execution&, const QueryKey&, AnyMatrix packed, AnyMatrix out, Array<float> inverse));

/// Gradients of `packed` from those of `out`, in place. packed: the input of `query_key` (not read when norm is none).
/// Rows whose column sums are the gradients of the parameters, fp32, for a GradientSink: query_rows [rows * heads,
/// head_size] (head), [rows, heads * head_size] (width) or empty; key_rows likewise; temperature_rows [rows, 1]
/// (scaled) or empty.
WEFT_KERNEL(query_key_backward,
            void(const Execution&, const QueryKey&, AnyMatrix packed, Array<const float> inverse, AnyMatrix gradient,
                 Matrix<float> query_rows, Matrix<float> key_rows, Matrix<float> temperature_rows));

}  // namespace weft::kernels

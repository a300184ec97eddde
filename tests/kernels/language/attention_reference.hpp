// SPDX-License-Identifier: Apache-2.0
//
// Shared by the tests of attention: cases, and their solution by definition in fp64.
#pragma once

#include "kernels/language/attention/attention.hpp"
#include "kernels/language/embedding/dropout.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

inline constexpr std::int64_t kGap = 8;  // elements of NaN after each row of a packed matrix

struct Case {
  std::int64_t sequences, length, heads, kv_heads, head_size;
  float softcap = 0;
  std::int64_t window = 0;
  bool documents = false;
  Scalar type = Scalar::fp32;
  float magnitude = 1;         // of queries and keys
  bool sparse = false;         // two of three blocks of keys are left out
  std::int64_t document = 37;  // rows per document
  float dropout = 0;
  std::int64_t first_row = 70;  // of dropout
};
inline constexpr std::uint64_t kDropoutSeed = 5, kDropoutStep = 9;
inline constexpr std::uint32_t kDropoutLayer = 3;

/// Inputs on the host, and what attention is by its definition: rows x rows probabilities of every head, in fp64.
struct Reference {
  kernels::Attention shape;                                 // without first_key
  std::vector<std::int32_t> first_key;                      // [rows], or empty
  std::vector<std::uint8_t> kept;                           // [sequences, heads, blocks, blocks], or empty
  std::vector<float> packed;                                // [rows, queries | keys | values | gap of NaN]
  std::vector<double> queries, keys, values, out_gradient;  // [rows, heads or kv_heads, head_size]
  std::vector<double> out, log_sum, dq, dk, dv;             // by compute()
  kernels::DropoutRule dropout;
  std::int64_t first_row;

  std::int64_t rows() const { return shape.rows(); }
  std::int64_t query_columns() const { return shape.heads * shape.head_size; }
  std::int64_t key_columns() const { return shape.kv_heads * shape.head_size; }
  std::int64_t stride() const { return query_columns() + 2 * key_columns() + kGap; }

  /// Random inputs, rounded to the type of the case.
  explicit Reference(const Case& c) {
    dropout = kernels::dropout_rule(c.dropout);
    first_row = c.first_row;
    shape = {c.sequences, c.length, c.heads, c.kv_heads, c.head_size, 1.0f / std::sqrt(static_cast<float>(c.head_size)),
             c.softcap,   c.window};
    const auto rounded = [&](float x) { return stored_as(c.type, x); };
    packed = random_floats(rows() * stride(), 1);
    for (std::int64_t i = 0; i < std::ssize(packed); ++i) {
      const std::int64_t column = i % stride();
      if (column < query_columns() + key_columns()) packed[i] *= 2 * c.magnitude;
      packed[i] = column < stride() - kGap ? rounded(packed[i]) : std::nanf("");
    }
    queries = part<double>(packed, 0, query_columns());
    keys = part<double>(packed, query_columns(), key_columns());
    values = part<double>(packed, query_columns() + key_columns(), key_columns());
    for (const float x : random_floats(rows() * query_columns(), 2)) out_gradient.push_back(rounded(x));
    if (c.sparse) {
      const std::int64_t blocks = shape.blocks();
      for (std::int64_t i = 0; i < c.sequences * c.heads * blocks * blocks; ++i) {
        const bool own = i / blocks % blocks == i % blocks;
        kept.push_back(own || kernels::philox(3, kernels::Purpose::test, 0, i).word[0] % 3 == 0 ? 1 : 0);
      }
    }
    if (c.documents)  // borders shifted from sequence to sequence
      for (std::int64_t b = 0; b < c.sequences; ++b)
        for (std::int64_t i = 0; i < c.length; ++i)
          first_key.push_back(
              static_cast<std::int32_t>(std::max<std::int64_t>(0, (i + 5 * b) / c.document * c.document - 5 * b)));
  }
  /// Columns [begin, begin + columns) of a packed matrix.
  template <class T>
  std::vector<T> part(const std::vector<float>& matrix, std::int64_t begin, std::int64_t columns) const {
    std::vector<T> out;
    for (std::int64_t i = 0; i < rows(); ++i)
      out.insert(out.end(), matrix.begin() + i * stride() + begin, matrix.begin() + i * stride() + begin + columns);
    return out;
  }

  bool reads(std::int64_t i, std::int64_t j, std::int64_t sequence, std::int64_t head) const {
    const std::int64_t blocks = shape.blocks(),
                       block = (sequence * shape.heads + head) * blocks + i / kernels::kKeyBlock;
    if (!kept.empty() && kept[block * blocks + j / kernels::kKeyBlock] == 0) return false;
    const std::int64_t first = first_key.empty() ? 0 : first_key[sequence * shape.length + i];
    return first <= j && j <= i && (shape.window == 0 || i - j < shape.window);
  }

  /// Of the probability of a key.
  double factor(std::int64_t i, std::int64_t j, std::int64_t sequence, std::int64_t head) const {
    if (dropout.kept == kernels::kMaskRange) return 1;
    const std::int64_t row = first_row + sequence * shape.length + i;
    return kernels::dropout_factor(
        dropout, kernels::attention_dropout_bits(kDropoutSeed, kDropoutStep, kDropoutLayer, row, head, j / 8), j % 8);
  }

  void compute() {
    const std::int64_t length = shape.length, d = shape.head_size;
    out.assign(queries.size(), 0.0);
    dq.assign(queries.size(), 0.0);
    dk.assign(keys.size(), 0.0);
    dv.assign(keys.size(), 0.0);
    log_sum.assign(shape.sequences * shape.heads * length, 0.0);
    std::vector<double> score(length), p(length);
    for (std::int64_t b = 0; b < shape.sequences; ++b)
      for (std::int64_t h = 0; h < shape.heads; ++h)
        for (std::int64_t i = 0; i < length; ++i) {
          const std::int64_t query = ((b * length + i) * shape.heads + h) * d;
          const auto key = [&](std::int64_t j) {
            return ((b * length + j) * shape.kv_heads + h / (shape.heads / shape.kv_heads)) * d;
          };
          double largest = -HUGE_VAL, total = 0, delta = 0;
          for (std::int64_t j = 0; j <= i; ++j) {
            score[j] = 0;
            for (std::int64_t c = 0; c < d; ++c) score[j] += shape.scale * queries[query + c] * keys[key(j) + c];
            if (shape.softcap > 0) score[j] = shape.softcap * std::tanh(score[j] / shape.softcap);
            if (reads(i, j, b, h)) largest = std::max(largest, score[j]);
          }
          for (std::int64_t j = 0; j <= i; ++j) {
            p[j] = reads(i, j, b, h) ? std::exp(score[j] - largest) : 0;
            total += p[j];
          }
          log_sum[(b * shape.heads + h) * length + i] = largest + std::log(total);
          for (std::int64_t j = 0; j <= i; ++j) {
            p[j] /= total;
            const double used = p[j] * factor(i, j, b, h);
            for (std::int64_t c = 0; c < d; ++c) out[query + c] += used * values[key(j) + c];
          }
          for (std::int64_t c = 0; c < d; ++c) delta += out_gradient[query + c] * out[query + c];
          for (std::int64_t j = 0; j <= i; ++j) {
            if (p[j] == 0) continue;
            double dp = 0;
            for (std::int64_t c = 0; c < d; ++c) dp += out_gradient[query + c] * values[key(j) + c];
            const double mask = factor(i, j, b, h);
            double ds = p[j] * (mask * dp - delta);
            if (shape.softcap > 0) ds *= 1 - score[j] / shape.softcap * score[j] / shape.softcap;
            for (std::int64_t c = 0; c < d; ++c) {
              dv[key(j) + c] += mask * p[j] * out_gradient[query + c];
              dq[query + c] += shape.scale * ds * keys[key(j) + c];
              dk[key(j) + c] += shape.scale * ds * queries[query + c];
            }
          }
        }
  }
};

/// |x - reference| / |reference| in the 2-norm; absolute where the reference is 0.
inline double relative_error(const std::vector<float>& x, const std::vector<double>& reference) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - reference[i]) * (x[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error) / (norm > 1e-12 ? std::sqrt(norm) : 1.0);
}

}  // namespace weft::testing

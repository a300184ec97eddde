// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. One block per row; a head is held by head_size / 8 adjacent lanes of a warp, which swap halves and
// sums by shuffles. Bytes per row in bf16: forward 4 per column of packed, in place 4 per column of queries and keys;
// backward 6 per column of queries and keys with a norm, 4 without, and 4 for the rows of a weight. Cosines and sines
// come from the first-level cache: all heads of a row share them. With `width` a row is read twice, the second time
// from the cache.
//
// Head sizes 16, 32, 64, 128 and 256, of which 16, 32, … columns are rotated, in rows that can be read 16 bytes at a
// time; others take the portable kernels.
#include "kernels/language/rope/query_key.hpp"
#include "kernels/language/rows_cuda.cuh"
#include "kernels/slow_paths.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;

/// Position of the eight columns of a thread in their head.
struct Place {
  int side;             ///< 0: queries, 1: keys, 2: values
  std::int64_t head;    ///< of its side
  int column;           ///< first of the eight, within the head
  const float* weight;  ///< of the eight, or none
};

__device__ __forceinline__ Place place_of(const QueryKey& q, std::int64_t vector, int group) {
  const std::int64_t head = vector / group;
  Place p{};
  p.column = static_cast<int>(vector % group) * 8;
  p.side = head < q.heads ? 0 : head < q.heads + q.kv_heads ? 1 : 2;
  p.head = p.side == 0 ? head : p.side == 1 ? head - q.heads : head - q.heads - q.kv_heads;
  const float* weight = p.side == 0 ? q.query_weight.data : q.key_weight.data;
  if (weight != nullptr && p.side < 2)
    p.weight = weight + p.column + (q.norm == QueryKeyNorm::width ? p.head * q.head_size : 0);
  return p;
}

/// Sum over the lanes of a head. Every lane of the warp calls it.
__device__ __forceinline__ float head_sum(float value, int group) {
  for (int offset = group / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

/// Rotates the eight columns by the angles of the row, times `direction` (1 or -1). Every lane of the warp calls it;
/// lanes of values, and of columns that are not rotated, keep theirs.
__device__ __forceinline__ void rotate(const QueryKey& q, std::int64_t row, const Place& p, float direction,
                                       float (&x)[8]) {
  if (q.rotary.data == nullptr) return;
  const int half = static_cast<int>(q.rotated()) / 2;
  float partner[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) partner[i] = __shfl_xor_sync(kAllLanes, x[i], half / 8);
  if (p.side == 2 || p.column >= 2 * half) return;
  const bool first = p.column < half;
  const float* table = q.rotary.data + q.positions[row] * (2 * half) + (first ? p.column : p.column - half);
  float cosine[8], sine[8];
  load_shared_by_rows(table, cosine);
  load_shared_by_rows(table + half, sine);
  const float sign = first ? -direction : direction;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] * cosine[i] + sign * (partner[i] * sine[i]);
}

__device__ __forceinline__ float inverse_of(const QueryKey& q, float squares, std::int64_t count) {
  if (q.norm == QueryKeyNorm::scaled) return squares > 0.0f ? 1.0f / sqrtf(squares) : 0.0f;
  return 1.0f / sqrtf(squares / static_cast<float>(count) + q.epsilon);
}

/// sqrt(head_size), for keys times the temperature; 1 for the other norms.
__device__ __forceinline__ float factor_of(const QueryKey& q, int side) {
  if (q.norm != QueryKeyNorm::scaled) return 1.0f;
  return sqrtf(static_cast<float>(q.head_size)) * (side == 1 ? *q.temperature : 1.0f);
}

/// Calls body(vector, active) for the groups of eight columns of a row: whole warps go round together.
template <class Body>
__device__ __forceinline__ void for_row(std::int64_t vectors, const Body& body) {
  for (std::int64_t first = threadIdx.x / kWarp * kWarp; first < vectors; first += kThreads) {
    const std::int64_t vector = first + threadIdx.x % kWarp;
    body(vector, vector < vectors);
  }
}

struct Forward {
  QueryKey q;
  AnyMatrix packed, out;
  float* inverse;
  int group;             ///< lanes of a head
  std::int64_t vectors;  ///< groups of eight columns to write: without the values in place
};

__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ Forward a) {
  const QueryKey& q = a.q;
  const std::int64_t row = blockIdx.x;
  float* inverses = a.inverse + row * q.inverses_per_row();
  float of_queries = 0.0f, of_keys = 0.0f;  // width: sums of squares, then inverse norms
  if (q.norm == QueryKeyNorm::width) {
    for_row((q.query_columns() + q.key_columns()) / 8, [&](std::int64_t vector, bool active) {
      float x[8];
      if (!active) return;
      load_columns_again(a.packed, row, vector * 8, x);
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
      (vector * 8 < q.query_columns() ? of_queries : of_keys) += squares;
    });
    of_queries = inverse_of(q, row_sum<kThreads>(of_queries), q.query_columns());
    of_keys = inverse_of(q, row_sum<kThreads>(of_keys), q.key_columns());
    if (threadIdx.x < 2) inverses[threadIdx.x] = threadIdx.x == 0 ? of_queries : of_keys;
  }
  for_row(a.vectors, [&](std::int64_t vector, bool active) {
    const Place p = place_of(q, vector, a.group);
    float x[8] = {};
    if (active) load_columns(a.packed, row, vector * 8, x);
    if (q.norm == QueryKeyNorm::width) {
      const float own = p.side == 0 ? of_queries : of_keys;
      if (p.side < 2)
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= own;
    } else if (q.norm != QueryKeyNorm::none) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
      const float own = inverse_of(q, head_sum(squares, a.group), q.head_size), factor = factor_of(q, p.side) * own;
      if (p.side < 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= factor;
        if (active && p.column == 0) inverses[vector / a.group] = own;
      }
    }
    if (p.weight != nullptr && active) {
      float weight[8];
      load_shared_by_rows(p.weight, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= weight[i];
    }
    rotate(q, row, p, 1.0f, x);
    if (active) store_columns(a.out, row, vector * 8, x);
  });
}

struct Backward {
  QueryKey q;
  AnyMatrix packed, gradient, query_rows, key_rows;  // rows of heads, or of all heads (width); fp32
  const float* inverse;
  Matrix<float> temperature_rows;
  int group;
};

/// The gradient behind the rotation, and the row before the norm, of eight columns.
__device__ __forceinline__ void load_backward(const Backward& a, std::int64_t row, std::int64_t vector, bool active,
                                              const Place& p, float (&dy)[8], float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) dy[i] = x[i] = 0.0f;
  if (active) load_columns_again(a.gradient, row, vector * 8, dy);
  if (active && a.q.norm != QueryKeyNorm::none) load_columns_again(a.packed, row, vector * 8, x);
  rotate(a.q, row, p, -1.0f, dy);
}

__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ Backward a) {
  const QueryKey& q = a.q;
  const std::int64_t row = blockIdx.x, vectors = (q.query_columns() + q.key_columns()) / 8;
  const float* inverses = a.inverse + row * q.inverses_per_row();
  const bool wide = q.norm == QueryKeyNorm::width;
  float of_queries = 0.0f, of_keys = 0.0f;  // width: means of w * dy * xhat over all heads
  if (wide) {
    for_row(vectors, [&](std::int64_t vector, bool active) {
      const Place p = place_of(q, vector, a.group);
      float dy[8], x[8], weight[8];
      load_backward(a, row, vector, active, p, dy, x);
      if (!active) return;
      load_shared_by_rows(p.weight, weight);
      const float own = inverses[p.side];
      float product = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) product += weight[i] * dy[i] * (x[i] * own);
      (p.side == 0 ? of_queries : of_keys) += product;
    });
    of_queries = row_sum<kThreads>(of_queries) / static_cast<float>(q.query_columns());
    of_keys = row_sum<kThreads>(of_keys) / static_cast<float>(q.key_columns());
  }
  float of_temperature = 0.0f;
  for_row(vectors, [&](std::int64_t vector, bool active) {
    const Place p = place_of(q, vector, a.group);
    float dy[8], x[8];
    load_backward(a, row, vector, active, p, dy, x);
    if (q.norm != QueryKeyNorm::none) {
      const float own = active ? inverses[wide ? p.side : vector / a.group] : 0.0f;
      float xhat[8], g[8], weight[8];  // g = w * dy
      if (p.weight != nullptr && active) load_shared_by_rows(p.weight, weight);
      float product = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        xhat[i] = x[i] * own;
        g[i] = p.weight != nullptr && active ? weight[i] * dy[i] : dy[i];
        product += g[i] * xhat[i];
      }
      float along = head_sum(product, a.group);
      if (q.norm == QueryKeyNorm::scaled && p.side == 1 && p.column == 0 && active) of_temperature += along;
      if (q.norm == QueryKeyNorm::head) along /= static_cast<float>(q.head_size);
      if (wide) along = p.side == 0 ? of_queries : of_keys;
      const AnyMatrix& weight_rows = p.side == 0 ? a.query_rows : a.key_rows;
      if (weight_rows.data != nullptr && p.weight != nullptr && active) {
        float rows[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rows[i] = dy[i] * xhat[i];
        if (wide)
          store_columns(weight_rows, row, p.head * q.head_size + p.column, rows);
        else
          store_columns(weight_rows, row * (p.side == 0 ? q.heads : q.kv_heads) + p.head, p.column, rows);
      }
      const float factor = factor_of(q, p.side) * own;
#pragma unroll
      for (int i = 0; i < 8; ++i) dy[i] = factor * (g[i] - xhat[i] * along);
    }
    // All lanes of the head have read their partners' columns by shuffle: a head is within one warp.
    if (active) store_columns(a.gradient, row, vector * 8, dy);
  });
  if (a.temperature_rows.data == nullptr) return;
  const float sum = row_sum<kThreads>(of_temperature);
  if (threadIdx.x == 0) a.temperature_rows(row, 0) = sqrtf(static_cast<float>(q.head_size)) * sum;
}

bool fits(const QueryKey& q) {
  return slow_query_key(q.head_size, q.rotated()).empty() && is_aligned(q.query_weight.data, 16) &&
         is_aligned(q.key_weight.data, 16) && is_aligned(q.rotary.data, 16);
}

AnyMatrix as_any(const Matrix<float>& matrix) {
  return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace

void query_key(const Execution& execution, const QueryKey& q, AnyMatrix packed, AnyMatrix out, Array<float> inverse) {
  if (!fits(q) || !vectors_fit(q.columns(), packed, out))
    return portable::query_key(execution, q, packed, out, inverse);
  const bool in_place = out.data == packed.data;
  if (packed.rows == 0 || (in_place && q.norm == QueryKeyNorm::none && q.rotary.data == nullptr)) return;
  const std::int64_t columns = in_place ? q.query_columns() + q.key_columns() : q.columns();
  const Forward a{q, packed, out, inverse.data, static_cast<int>(q.head_size / 8), columns / 8};
  forward<<<static_cast<unsigned>(packed.rows), kThreads, 0, stream_of(execution)>>>(a);
  require_launch("query_key");
}

void query_key_backward(const Execution& execution, const QueryKey& q, AnyMatrix packed, Array<const float> inverse,
                        AnyMatrix gradient, Matrix<float> query_rows, Matrix<float> key_rows,
                        Matrix<float> temperature_rows) {
  const AnyMatrix of_queries = as_any(query_rows), of_keys = as_any(key_rows);
  if (!fits(q) || !vectors_fit(q.columns(), packed, gradient, of_queries, of_keys))
    return portable::query_key_backward(execution, q, packed, inverse, gradient, query_rows, key_rows,
                                        temperature_rows);
  if (gradient.rows == 0 || (q.norm == QueryKeyNorm::none && q.rotary.data == nullptr)) return;
  const Backward a{q,       packed,       gradient,         of_queries,
                   of_keys, inverse.data, temperature_rows, static_cast<int>(q.head_size / 8)};
  backward<<<static_cast<unsigned>(gradient.rows), kThreads, 0, stream_of(execution)>>>(a);
  require_launch("query_key_backward");
}

}  // namespace weft::kernels::cuda

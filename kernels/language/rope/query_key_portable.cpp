// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/rope/query_key.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels::portable {
namespace {

/// A head is read in parts whose elements belong together: two halves that are rotated, or itself.
struct QueryKeyScratch {
  float x[2][kChunkColumns];
  float y[2][kChunkColumns];
};

/// The heads of queries (side 0) or keys (side 1) of a row.
struct Side {
  std::int64_t heads, column, first_inverse;
  const float* weight;
  float factor;  ///< besides the norm: sqrt(head_size), for keys times the temperature
};

KOKKOS_INLINE_FUNCTION Side side_of(const QueryKey& q, int side) {
  Side out{};
  out.heads = side == 0 ? q.heads : q.kv_heads;
  out.column = side == 0 ? 0 : q.heads * q.head_size;
  out.first_inverse = side == 0 ? 0 : q.norm == QueryKeyNorm::width ? 1 : q.heads;
  out.weight = side == 0 ? q.query_weight.data : q.key_weight.data;
  out.factor = 1.0f;
  if (q.norm == QueryKeyNorm::scaled)
    out.factor = sqrtf(static_cast<float>(q.head_size)) * (side == 0 ? 1.0f : *q.temperature);
  return out;
}

/// Weights of a head, or none.
KOKKOS_INLINE_FUNCTION const float* weight_of(const QueryKey& q, const Side& side, std::int64_t head) {
  return q.norm == QueryKeyNorm::width ? side.weight + head * q.head_size : side.weight;
}

/// Inverse norm of `count` elements from the sum of their squares. Of zeros, scaled, 0: they stay zeros.
KOKKOS_INLINE_FUNCTION float inverse_of(const QueryKey& q, float squares, std::int64_t count) {
  if (q.norm == QueryKeyNorm::scaled) return squares > 0.0f ? 1.0f / sqrtf(squares) : 0.0f;
  return 1.0f / sqrtf(squares / static_cast<float>(count) + q.epsilon);
}

KOKKOS_INLINE_FUNCTION float sum_of_squares(const Team& team, const AnyMatrix& matrix, std::int64_t row,
                                            std::int64_t column, std::int64_t columns, float* buffer) {
  float sum = 0.0f;
  for_chunks(columns, columns, [&](std::int64_t chunk, int count) {
    const float* x = row_chunk(team, matrix, row, column + chunk, count, buffer);
    sum += sum_columns<float>(team, count, [&](int c) { return x[c] * x[c]; });
  });
  return sum;
}

KOKKOS_INLINE_FUNCTION const float* rotary_of(const QueryKey& q, std::int64_t row) {
  return q.rotary.data + q.positions[row] * q.rotated();
}

/// Columns of a head: the rotated ones, in two parts, and those after them in one.
struct HeadColumns {
  std::int64_t begin;
  int parts;
  std::int64_t size;  ///< of a part
};

template <class Body>
KOKKOS_INLINE_FUNCTION void for_head_columns(const QueryKey& q, const Body& body) {
  const std::int64_t rotated = q.rotated();
  if (rotated > 0) body(HeadColumns{0, 2, rotated / 2});
  if (rotated < q.head_size) body(HeadColumns{rotated, 1, q.head_size - rotated});
}

/// buffer.y = the gradient of a head before its rotation: columns [column, column + count) of each part. first: column
/// of the parts in the row.
KOKKOS_INLINE_FUNCTION void rotate_back(const Team& team, const QueryKey& q, const AnyMatrix& gradient,
                                        std::int64_t row, std::int64_t first, const HeadColumns& columns,
                                        std::int64_t column, int count, QueryKeyScratch& buffer) {
  const float* a = row_chunk(team, gradient, row, first + column, count, buffer.x[0]);
  if (columns.parts == 1) {
    for_columns(team, count, [&](int c) { buffer.y[0][c] = a[c]; });
    return;
  }
  const std::int64_t half = columns.size;
  const float* b = row_chunk(team, gradient, row, first + half + column, count, buffer.x[1]);
  const float *cosine = rotary_of(q, row) + column, *sine = cosine + half;
  for_columns(team, count, [&](int c) {
    buffer.y[0][c] = a[c] * cosine[c] + b[c] * sine[c];
    buffer.y[1][c] = b[c] * cosine[c] - a[c] * sine[c];
  });
}

}  // namespace

void query_key(const Execution& execution, const QueryKey& options, AnyMatrix packed, AnyMatrix out,
               Array<float> inverse) {
  const QueryKey q = options;
  for_rows<QueryKeyScratch>(
      execution, "query_key", packed.rows, KOKKOS_LAMBDA(const Team& team, QueryKeyScratch& buffer, std::int64_t row) {
        float* inverses = inverse.data + row * q.inverses_per_row();
        for (int s = 0; s < 2; ++s) {
          const Side side = side_of(q, s);
          float over_heads = 1.0f;
          if (q.norm == QueryKeyNorm::width) {
            const std::int64_t columns = side.heads * q.head_size;
            over_heads = inverse_of(q, sum_of_squares(team, packed, row, side.column, columns, buffer.x[0]), columns);
            once(team, [&] { inverses[side.first_inverse] = over_heads; });
          }
          for (std::int64_t head = 0; head < side.heads; ++head) {
            const std::int64_t at = side.column + head * q.head_size;
            float factor = side.factor * over_heads;
            if (q.norm == QueryKeyNorm::head || q.norm == QueryKeyNorm::scaled) {
              const float own =
                  inverse_of(q, sum_of_squares(team, packed, row, at, q.head_size, buffer.x[0]), q.head_size);
              once(team, [&] { inverses[side.first_inverse + head] = own; });
              factor *= own;
            }
            const float* weight = weight_of(q, side, head);
            for_head_columns(q, [&](const HeadColumns& columns) {
              const std::int64_t part = columns.size, first = at + columns.begin;
              for_chunks(part, part, [&](std::int64_t column, int count) {
                for (int p = 0; p < columns.parts; ++p) {
                  const float* x = row_chunk(team, packed, row, first + p * part + column, count, buffer.x[p]);
                  if (weight == nullptr) {
                    for_columns(team, count, [&](int c) { buffer.y[p][c] = x[c] * factor; });
                  } else {
                    const float* w = weight + columns.begin + p * part + column;
                    for_columns(team, count, [&](int c) { buffer.y[p][c] = w[c] * (x[c] * factor); });
                  }
                }
                const float *a = buffer.y[0], *b = buffer.y[1];
                if (columns.parts == 1) {
                  store_chunk(team, out, row, first + column, count, [&](int c) { return a[c]; });
                } else {
                  const float *cosine = rotary_of(q, row) + column, *sine = cosine + part;
                  store_chunk(team, out, row, first + column, count,
                              [&](int c) { return a[c] * cosine[c] - b[c] * sine[c]; });
                  store_chunk(team, out, row, first + part + column, count,
                              [&](int c) { return b[c] * cosine[c] + a[c] * sine[c]; });
                }
              });
            });
          }
        }
        if (out.data == packed.data) return;
        const std::int64_t values = q.query_columns() + q.key_columns();
        for_chunks(q.key_columns(), q.key_columns(), [&](std::int64_t column, int count) {
          const float* x = row_chunk(team, packed, row, values + column, count, buffer.x[0]);
          store_chunk(team, out, row, values + column, count, [&](int c) { return x[c]; });
        });
      });
}

void query_key_backward(const Execution& execution, const QueryKey& options, AnyMatrix packed,
                        Array<const float> inverse, AnyMatrix gradient, Matrix<float> query_rows,
                        Matrix<float> key_rows, Matrix<float> temperature_rows) {
  const QueryKey q = options;
  if (q.norm == QueryKeyNorm::none && q.rotary.data == nullptr) return;
  for_rows<QueryKeyScratch>(
      execution, "query_key_backward", gradient.rows,
      KOKKOS_LAMBDA(const Team& team, QueryKeyScratch& buffer, std::int64_t row) {
        const float* inverses = inverse.data + row * q.inverses_per_row();
        float of_temperature = 0.0f;
        for (int s = 0; s < 2; ++s) {
          const Side side = side_of(q, s);
          const Matrix<float> weight_rows = s == 0 ? query_rows : key_rows;
          const bool wide = q.norm == QueryKeyNorm::width;
          // Sum over a head of w * dy * xhat.
          const auto product_of = [&](std::int64_t head, float own) {
            const std::int64_t at = side.column + head * q.head_size;
            const float* weight = weight_of(q, side, head);
            float sum = 0.0f;
            for_head_columns(q, [&](const HeadColumns& columns) {
              const std::int64_t part = columns.size, first = at + columns.begin;
              for_chunks(part, part, [&](std::int64_t column, int count) {
                rotate_back(team, q, gradient, row, first, columns, column, count, buffer);
                for (int p = 0; p < columns.parts; ++p) {
                  const float* x = row_chunk(team, packed, row, first + p * part + column, count, buffer.x[0]);
                  const float* dy = buffer.y[p];
                  if (weight == nullptr) {
                    sum += sum_columns<float>(team, count, [&](int c) { return dy[c] * (x[c] * own); });
                  } else {
                    const float* w = weight + columns.begin + p * part + column;
                    sum += sum_columns<float>(team, count, [&](int c) { return w[c] * dy[c] * (x[c] * own); });
                  }
                }
              });
            });
            return sum;
          };
          float over_heads = 0.0f;
          if (wide) {
            for (std::int64_t head = 0; head < side.heads; ++head)
              over_heads += product_of(head, inverses[side.first_inverse]);
            over_heads /= static_cast<float>(side.heads * q.head_size);
          }
          for (std::int64_t head = 0; head < side.heads; ++head) {
            const std::int64_t at = side.column + head * q.head_size;
            float own = 1.0f, along = 0.0f;  // inverse norm; part of the gradient along xhat
            if (wide) {
              own = inverses[side.first_inverse];
              along = over_heads;
            } else if (q.norm != QueryKeyNorm::none) {
              own = inverses[side.first_inverse + head];
              along = product_of(head, own);
              if (q.norm == QueryKeyNorm::head) along /= static_cast<float>(q.head_size);
              if (s == 1) of_temperature += along;
            }
            const float* weight = weight_of(q, side, head);
            const float factor = side.factor * own;
            for_head_columns(q, [&](const HeadColumns& columns) {
              const std::int64_t part = columns.size, first = at + columns.begin;
              for_chunks(part, part, [&](std::int64_t column, int count) {
                rotate_back(team, q, gradient, row, first, columns, column, count, buffer);
                for (int p = 0; p < columns.parts; ++p) {
                  const std::int64_t in_head = columns.begin + p * part + column;
                  const float* dy = buffer.y[p];
                  if (q.norm == QueryKeyNorm::none) {
                    store_chunk(team, gradient, row, at + in_head, count, [&](int c) { return dy[c]; });
                    continue;
                  }
                  const float* x = row_chunk(team, packed, row, at + in_head, count, buffer.x[0]);
                  if (weight == nullptr) {
                    store_chunk(team, gradient, row, at + in_head, count,
                                [&](int c) { return factor * (dy[c] - (x[c] * own) * along); });
                    continue;
                  }
                  const float* w = weight + in_head;
                  store_chunk(team, gradient, row, at + in_head, count,
                              [&](int c) { return factor * (w[c] * dy[c] - (x[c] * own) * along); });
                  if (weight_rows.data != nullptr) {
                    float* to =
                        wide ? weight_rows.row(row) + head * q.head_size : weight_rows.row(row * side.heads + head);
                    for_columns(team, count, [&](int c) { to[in_head + c] = dy[c] * (x[c] * own); });
                  }
                }
              });
            });
          }
        }
        if (temperature_rows.data != nullptr)
          once(team, [&] { temperature_rows(row, 0) = sqrtf(static_cast<float>(q.head_size)) * of_temperature; });
      });
}

}  // namespace weft::kernels::portable

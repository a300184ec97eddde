// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/rope/query_key.hpp"

#include <complex>

#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr double kBase = 10000;
constexpr std::int64_t kLongest = 50;
constexpr QueryKeyNorm kNorms[] = {QueryKeyNorm::none, QueryKeyNorm::head, QueryKeyNorm::width, QueryKeyNorm::scaled};

struct Shape {
  std::int64_t heads, kv_heads, head_size, rotary_columns = 0;  ///< 0: all
  std::int64_t rotated() const { return rotary_columns > 0 ? rotary_columns : head_size; }
};

/// The parameters of a case in float64.
struct Options64 {
  Shape shape;
  QueryKeyNorm norm = QueryKeyNorm::none;
  bool rotary = false;
  std::vector<double> query_weight, key_weight;
  double temperature = 1, epsilon = 1e-6f;
  std::vector<std::complex<double>> turns;  ///< [kLongest, r / 2]: exp(i position base^(-2 j / r)), r = rotated()
};

/// One row of query_key in float64: norms by their definition, rotations as products of complex numbers.
std::vector<double> row64(const Options64& o, std::vector<double> row, std::int64_t position) {
  const std::int64_t heads = o.shape.heads, kv_heads = o.shape.kv_heads, d = o.shape.head_size;
  const std::int64_t half = o.shape.rotated() / 2;
  for (int side = 0; side < 2; ++side) {
    const std::int64_t n = side == 0 ? heads : kv_heads, first = side == 0 ? 0 : heads * d;
    const std::vector<double>& weight = side == 0 ? o.query_weight : o.key_weight;
    const auto squares = [&](std::int64_t begin, std::int64_t count) {
      double sum = 0;
      for (std::int64_t j = begin; j < begin + count; ++j) sum += row[j] * row[j];
      return sum;
    };
    const double all = squares(first, n * d);
    for (std::int64_t head = 0; head < n; ++head) {
      const std::int64_t at = first + head * d;
      const double own = squares(at, d);
      for (std::int64_t j = 0; j < d; ++j) {
        double& x = row[at + j];
        if (o.norm == QueryKeyNorm::head) x *= weight[j] / std::sqrt(own / static_cast<double>(d) + o.epsilon);
        if (o.norm == QueryKeyNorm::width)
          x *= weight[head * d + j] / std::sqrt(all / static_cast<double>(n * d) + o.epsilon);
        if (o.norm == QueryKeyNorm::scaled)
          x *= own > 0 ? std::sqrt(static_cast<double>(d) / own) * (side == 0 ? 1 : o.temperature) : 0;
      }
      for (std::int64_t j = 0; j < half && o.rotary; ++j) {
        const std::complex<double> z =
            std::complex<double>(row[at + j], row[at + half + j]) * o.turns[position * half + j];
        row[at + j] = z.real();
        row[at + half + j] = z.imag();
      }
    }
  }
  return row;
}

/// Gradients of sum over the row of out * dy, by central differences of row64, whose truncation error is below 1e-8.
struct Gradients64 {
  std::vector<double> packed, query_weight, key_weight;
  double temperature = 0;
};
Gradients64 gradients64(Options64 o, std::vector<double> row, std::int64_t position, const std::vector<double>& dy) {
  const auto difference = [&](double& x) {
    const auto at = [&](double value) {
      x = value;
      const std::vector<double> out = row64(o, row, position);
      double sum = 0;
      for (std::size_t j = 0; j < out.size(); ++j) sum += out[j] * dy[j];
      return sum;
    };
    const double before = x, step = 1e-4 * (1 + std::abs(x));
    // Of fourth order.
    const double slope =
        (8 * (at(before + step) - at(before - step)) - (at(before + 2 * step) - at(before - 2 * step))) / (12 * step);
    x = before;
    return slope;
  };
  Gradients64 out;
  for (double& x : row) out.packed.push_back(difference(x));
  for (double& w : o.query_weight) out.query_weight.push_back(difference(w));
  for (double& w : o.key_weight) out.key_weight.push_back(difference(w));
  out.temperature = difference(o.temperature);
  return out;
}

/// A case in the memory of the kernels.
struct Case {
  Options64 exact;
  DeviceArray<float> query_weight, key_weight, temperature, table;
  DeviceArray<std::int32_t> positions;
  std::vector<std::int32_t> position;

  Case(const Shape& shape, QueryKeyNorm norm, bool rotary, std::int64_t rows) {
    const std::int64_t d = shape.head_size;
    const bool wide = norm == QueryKeyNorm::width, weights = wide || norm == QueryKeyNorm::head;
    exact.shape = shape;
    exact.norm = norm;
    exact.rotary = rotary;
    const std::int64_t rotated = shape.rotated(), half = rotated / 2;
    for (std::int64_t i = 0; i < kLongest * half; ++i)
      exact.turns.push_back(
          std::polar(1.0, static_cast<double>(i / half) *
                              std::pow(kBase, -2.0 * static_cast<double>(i % half) / static_cast<double>(rotated))));
    const std::vector<float> query = random_floats(weights ? (wide ? shape.heads * d : d) : 0, 21),
                             key = random_floats(weights ? (wide ? shape.kv_heads * d : d) : 0, 22);
    exact.query_weight = widened(query);
    exact.key_weight = widened(key);
    exact.temperature = 1.25;
    query_weight = DeviceArray<float>(query);
    key_weight = DeviceArray<float>(key);
    temperature = DeviceArray<float>(std::vector<float>{1.25f});
    std::vector<float> host_table(static_cast<std::size_t>(kLongest * rotated));
    rotary_table(kBase, {}, rotated, kLongest, host_table.data());
    table = DeviceArray<float>(host_table);
    for (std::int64_t n = 0; n < rows; ++n) position.push_back(static_cast<std::int32_t>((n * 17 + 3) % kLongest));
    positions = DeviceArray<std::int32_t>(position);
  }
  QueryKey view() const {
    QueryKey q;
    q.heads = exact.shape.heads;
    q.kv_heads = exact.shape.kv_heads;
    q.head_size = exact.shape.head_size;
    q.norm = exact.norm;
    q.epsilon = static_cast<float>(exact.epsilon);
    if (query_weight.size() > 0) {
      q.query_weight = query_weight.array();
      q.key_weight = key_weight.array();
    }
    q.temperature = temperature.data();
    if (exact.rotary) q.rotary = table.array();
    q.rotary_columns = exact.shape.rotary_columns;
    q.positions = positions.array();
    return q;
  }
};

std::vector<double> row_of(const std::vector<float>& values, std::int64_t row, std::int64_t columns) {
  return {values.begin() + row * columns, values.begin() + (row + 1) * columns};
}

/// Sums of the columns of [rows, columns].
std::vector<double> column_sums(const std::vector<float>& values, std::int64_t columns) {
  std::vector<double> out(static_cast<std::size_t>(columns));
  for (std::size_t i = 0; i < values.size(); ++i) out[i % columns] += values[i];
  return out;
}

}  // namespace

TEST_CASE("norm and rotation of queries and keys agree with float64, and so do all gradients") {
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const Shape& shape :
         {Shape{1, 1, 2}, {4, 2, 16}, {3, 1, 64}, {2, 2, 24}, {2, 1, 128}, {1, 1, 264}, {3, 1, 64, 16}, {2, 1, 24, 6}})
      for (const QueryKeyNorm norm : kNorms)
        for (const bool rotary : {false, true})
          for (const Scalar type : kRowTypes) {
            // A norm over two elements leaves a gradient of one direction: its error is not relative.
            if (shape.head_size == 2 && norm != QueryKeyNorm::none) continue;
            CAPTURE(shape.head_size);
            CAPTURE(static_cast<int>(norm));
            CAPTURE(rotary);
            const std::int64_t rows = shape.head_size > 64 ? 2 : 5;
            const Margins margin = kMargins[margins++ % 3];
            const Case c(shape, norm, rotary, rows);
            const QueryKey q = c.view();
            const std::int64_t columns = q.columns();
            const Rows packed(random_floats(rows * columns, 1), rows, columns, type, margin),
                gradient(random_floats(rows * columns, 2), rows, columns, type, margin);
            const Rows out(rows, columns, type, margin);
            const DeviceArray<float> inverse(rows * q.inverses_per_row());
            const bool wide = norm == QueryKeyNorm::width, weights = wide || norm == QueryKeyNorm::head;
            const DeviceArray<float> query_rows(weights ? rows * q.query_columns() : 0),
                key_rows(weights ? rows * q.key_columns() : 0), temperature_rows(rows);
            const std::vector<float> x = packed.values(), dy = gradient.values();

            query_key(execution, q, packed.view(), out.view(), inverse.array());
            Matrix<float> query_view, key_view, temperature_view;
            if (weights) {
              query_view = wide ? query_rows.matrix(rows, q.query_columns())
                                : query_rows.matrix(rows * shape.heads, shape.head_size);
              key_view = wide ? key_rows.matrix(rows, q.key_columns())
                              : key_rows.matrix(rows * shape.kv_heads, shape.head_size);
            }
            if (norm == QueryKeyNorm::scaled) temperature_view = temperature_rows.matrix(rows, 1);
            query_key_backward(execution, q, packed.view(), inverse.array(), gradient.view(), query_view, key_view,
                               temperature_view);

            std::vector<double> want, want_gradient;
            Gradients64 sums;
            sums.query_weight.resize(c.exact.query_weight.size());
            sums.key_weight.resize(c.exact.key_weight.size());
            for (std::int64_t n = 0; n < rows; ++n) {
              const std::vector<double> row = row_of(x, n, columns);
              const std::vector<double> y = row64(c.exact, row, c.position[n]);
              want.insert(want.end(), y.begin(), y.end());
              const Gradients64 g = gradients64(c.exact, row, c.position[n], row_of(dy, n, columns));
              want_gradient.insert(want_gradient.end(), g.packed.begin(), g.packed.end());
              for (std::size_t j = 0; j < g.query_weight.size(); ++j) sums.query_weight[j] += g.query_weight[j];
              for (std::size_t j = 0; j < g.key_weight.size(); ++j) sums.key_weight[j] += g.key_weight[j];
              sums.temperature += g.temperature;
            }
            CHECK(relative_error(out.values(), want) <= row_tolerance(type));
            CHECK(relative_error(gradient.values(), want_gradient) <= row_tolerance(type));
            if (weights) {
              CHECK(relative_error(column_sums(query_rows.values(), std::ssize(sums.query_weight)),
                                   sums.query_weight) <= 1e-6);
              CHECK(relative_error(column_sums(key_rows.values(), std::ssize(sums.key_weight)), sums.key_weight) <=
                    1e-6);
            }
            if (norm == QueryKeyNorm::scaled) {
              CHECK(sums.temperature != 0);
              CHECK(column_sums(temperature_rows.values(), 1)[0] == doctest::Approx(sums.temperature).epsilon(1e-5));
            }
          }
  });
}

TEST_CASE("a rotation in place gives the same bits, its backward undoes it, and position 0 is the identity") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : {Shape{3, 1, 64}, {2, 2, 10}}) {
      const std::int64_t rows = 50;
      Case c(shape, QueryKeyNorm::none, true, rows);
      for (std::int64_t n = 0; n < rows; ++n) c.position[n] = static_cast<std::int32_t>(n);
      c.positions.set(c.position);
      const std::int64_t columns = c.view().columns();
      const std::vector<float> x = random_floats(rows * columns, 1);
      const Rows packed(x, rows, columns, Scalar::fp32), out(rows, columns, Scalar::fp32);
      query_key(execution, c.view(), packed.view(), out.view(), {});
      query_key(execution, c.view(), packed.view(), packed.view(), {});
      const std::vector<float> rotated = out.values();
      CHECK(packed.values() == rotated);
      CHECK(std::equal(x.begin(), x.begin() + columns, rotated.begin()));
      query_key_backward(execution, c.view(), {}, {}, out.view(), {}, {}, {});
      CHECK(relative_error(out.values(), widened(x)) <= 3e-7);
    }
  });
}

TEST_CASE("queries and keys of zeros stay finite, forward and backward") {
  for_each_backend([&](const Execution& execution) {
    for (const QueryKeyNorm norm : kNorms) {
      const Case c({2, 1, 16}, norm, true, 1);
      const QueryKey q = c.view();
      const Rows packed(std::vector<float>(q.columns()), 1, q.columns(), Scalar::fp32),
          gradient(random_floats(q.columns(), 2), 1, q.columns(), Scalar::fp32), out(1, q.columns(), Scalar::fp32);
      const DeviceArray<float> inverse(3);
      query_key(execution, q, packed.view(), out.view(), inverse.array());
      query_key_backward(execution, q, packed.view(), inverse.array(), gradient.view(), {}, {}, {});
      for (const float y : out.values()) CHECK(y == 0);
      for (const float g : gradient.values()) CHECK(std::isfinite(g));
    }
  });
}

}  // namespace weft::testing

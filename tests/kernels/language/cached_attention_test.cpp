// SPDX-License-Identifier: Apache-2.0
//
// Attention against a cache: agrees with its definition in float64, does not depend on where the rows of a sequence are
// or on the other rows, and stores the new rows.
#include "kernels/language/decode/cached_attention.hpp"

#include <algorithm>
#include <bit>
#include <map>

#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {
namespace {

using namespace weft::kernels;

struct Shape {
  std::int64_t heads, kv_heads, head_size;
  float softcap = 0;
  std::int64_t window = 0;

  std::int64_t query_columns() const { return heads * head_size; }
  std::int64_t key_columns() const { return kv_heads * head_size; }
};

/// Positions of the new rows; a prefix that is `shared` belongs to all sequences, otherwise each has a copy.
struct Layout {
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> prefixes;
  bool shared = true;
  std::int64_t filler = 0;  // unused cache rows before the first
};

/// Key or value of a position. Positions below 300 are the same for all sequences.
std::vector<float> position_row(std::uint64_t stream, std::size_t sequence, std::int32_t position, std::int64_t columns,
                                Scalar type) {
  const std::uint64_t owner = position < 300 ? 0 : sequence + 1;
  std::vector<float> row =
      random_floats(columns, stream * 1000000 + owner * 10000 + static_cast<std::uint64_t>(position));
  for (float& x : row) x = stored_as(type, 2 * x);
  return row;
}

struct Result {
  std::vector<float> out, cached_keys, cached_values;
  std::vector<std::int64_t> stored;  // cache row of each new row; -1: the sequence does not run
};

class Problem {
 public:
  Problem(const Shape& shape, const Layout& layout, Scalar type) : shape_(shape), layout_(layout), type_(type) {
    const std::size_t n = layout.positions.size();
    std::int64_t next = layout.filler;
    for (std::size_t i = 0; i < n; ++i) {
      CachedSequence sequence;
      sequence.prefix = layout.prefixes[i];
      if (layout.shared && i > 0) {
        sequence.prefix_begin = sequences_[0].prefix_begin;
      } else {
        sequence.prefix_begin = next;
        next += 300;
      }
      sequence.own_begin = next;
      next += layout.positions[i] + 1;
      sequence.end = layout.positions[i] + 1;
      sequences_.push_back(sequence);
    }
    cache_rows_ = next;
    const std::int64_t columns = shape.key_columns();
    keys_.assign(cache_rows_ * columns, std::nanf(""));
    values_ = keys_;
    for (std::size_t i = 0; i < n; ++i)
      for (std::int32_t p = 0; p < layout.positions[i]; ++p) {
        put(keys_, sequences_[i].row(p), position_row(1, i, p, columns, type));
        put(values_, sequences_[i].row(p), position_row(2, i, p, columns, type));
      }
  }

  std::vector<CachedSequence>& sequences() { return sequences_; }

  std::vector<float> query(std::size_t sequence) const {
    std::vector<float> row = random_floats(shape_.query_columns(), 77 + sequence);
    for (float& x : row) x = stored_as(type_, x);
    return row;
  }

  Result run(const Execution& execution, Margins margin = {8, 16}) const {
    const std::int64_t rows = std::ssize(sequences_), columns = shape_.key_columns();
    std::vector<float> queries, keys, values;
    Result result;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const std::int32_t p = layout_.positions[i];
      const auto append = [](std::vector<float>& to, const std::vector<float>& row) {
        to.insert(to.end(), row.begin(), row.end());
      };
      append(queries, query(i));
      append(keys, position_row(1, i, p, columns, type_));
      append(values, position_row(2, i, p, columns, type_));
      result.stored.push_back(p < sequences_[i].end ? sequences_[i].row(p) : -1);
    }
    const Rows q(queries, rows, shape_.query_columns(), type_, margin), k(keys, rows, columns, type_, margin),
        v(values, rows, columns, type_, margin), out(rows, shape_.query_columns(), type_, margin);
    const TestMatrix cached_keys(keys_, cache_rows_, columns, type_),
        cached_values(values_, cache_rows_, columns, type_);
    const DeviceArray<CachedSequence> sequences(sequences_);
    const DeviceArray<std::int32_t> positions(layout_.positions);
    const CachedAttention attention{.heads = shape_.heads,
                                    .kv_heads = shape_.kv_heads,
                                    .head_size = shape_.head_size,
                                    .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_size)),
                                    .softcap = shape_.softcap,
                                    .window = shape_.window,
                                    .longest = *std::ranges::max_element(layout_.positions) + 1,
                                    .sequences = sequences.array(),
                                    .positions = positions.array()};
    // Twice: a call leaves the cache as the next one needs it.
    for (int i = 0; i < 2; ++i)
      cached_attention(execution, attention, q.view(), k.view(), v.view(), cached_keys.view(), cached_values.view(),
                       out.view());
    result.out = out.values();
    result.cached_keys = cached_keys.values();
    result.cached_values = cached_values.values();
    return result;
  }

  /// By definition, in fp64.
  std::vector<double> expected(std::size_t i) const {
    const std::int32_t position = layout_.positions[i];
    const std::int64_t d = shape_.head_size, group = shape_.heads / shape_.kv_heads;
    const std::int32_t lower =
        shape_.window > 0 ? std::max<std::int32_t>(0, position - static_cast<std::int32_t>(shape_.window) + 1) : 0;
    std::vector<double> out(static_cast<std::size_t>(shape_.query_columns()));
    const std::vector<float> q = query(i);
    std::vector<std::vector<float>> keys, values;
    for (std::int32_t p = lower; p <= position; ++p) {
      keys.push_back(position_row(1, i, p, shape_.key_columns(), type_));
      values.push_back(position_row(2, i, p, shape_.key_columns(), type_));
    }
    for (std::int64_t head = 0; head < shape_.heads; ++head) {
      std::vector<double> score;
      double largest = -1e300, total = 0;
      for (const std::vector<float>& key : keys) {
        double s = 0;
        for (std::int64_t c = 0; c < d; ++c)
          s += static_cast<double>(q[head * d + c]) * static_cast<double>(key[head / group * d + c]);
        s /= std::sqrt(static_cast<double>(d));
        if (shape_.softcap > 0) s = shape_.softcap * std::tanh(s / shape_.softcap);
        score.push_back(s);
        largest = std::max(largest, s);
      }
      for (double& s : score) total += s = std::exp(s - largest);
      for (std::size_t j = 0; j < values.size(); ++j)
        for (std::int64_t c = 0; c < d; ++c)
          out[head * d + c] += score[j] / total * static_cast<double>(values[j][head / group * d + c]);
    }
    return out;
  }

  bool stores(const Result& result) const {
    std::vector<float> keys = keys_, values = values_;
    for (std::size_t i = 0; i < sequences_.size(); ++i)
      if (result.stored[i] >= 0) {
        put(keys, result.stored[i], position_row(1, i, layout_.positions[i], shape_.key_columns(), type_));
        put(values, result.stored[i], position_row(2, i, layout_.positions[i], shape_.key_columns(), type_));
      }
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return (std::isnan(x) && std::isnan(y)) || std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
      });
    };
    return same(keys, result.cached_keys) && same(values, result.cached_values);
  }

 private:
  void put(std::vector<float>& cache, std::int64_t row, const std::vector<float>& values) const {
    std::copy(values.begin(), values.end(), cache.begin() + row * std::ssize(values));
  }

  const Shape shape_;
  const Layout layout_;
  const Scalar type_;
  std::int64_t cache_rows_ = 0;
  std::vector<CachedSequence> sequences_;
  std::vector<float> keys_, values_;
};

std::vector<float> row_of(const Result& result, std::size_t row, const Shape& shape) {
  const auto begin = result.out.begin() + static_cast<std::ptrdiff_t>(row) * shape.query_columns();
  return {begin, begin + shape.query_columns()};
}

const Shape kShapes[] = {
    {2, 2, 8},  {6, 3, 24}, {4, 1, 64}, {12, 12, 64}, {8, 1, 96, 5.0f}, {5, 5, 128, 0, 130}, {4, 2, 256, 30.0f, 5},
    {10, 2, 40}};

}  // namespace

TEST_CASE("cached_attention agrees with the definition and stores the new rows") {
  // One position; within one block of keys; at its border; several blocks; a prefix that ends inside a block.
  const Layout layout{.positions = {0, 5, 63, 64, 127, 128, 400, 1299}, .prefixes = {0, 5, 40, 10, 127, 0, 300, 129}};
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const Scalar type : kRowTypes) {
        CAPTURE(shape.head_size);
        const Problem problem(shape, layout, type);
        const Result result = problem.run(execution);
        CHECK(problem.stores(result));
        // In fp32 the rounding of chains over up to 1,000 keys.
        for (std::size_t i = 0; i < layout.positions.size(); ++i)
          CHECK(relative_error(row_of(result, i, shape), problem.expected(i)) <=
                (type == Scalar::fp32 ? 2 : 1) * row_tolerance(type));
      }
  });
}

TEST_CASE("cached_attention reads rows that are not whole 16-byte words") {
  const Shape shape{3, 3, 8};
  const Layout layout{.positions = {3, 200}, .prefixes = {0, 100}};
  for_each_backend([&](const Execution& execution) {
    const Problem problem(shape, layout, Scalar::bf16);
    const Result result = problem.run(execution, {3, 2});
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(relative_error(row_of(result, i, shape), problem.expected(i)) <= row_tolerance(Scalar::bf16));
  });
}

TEST_CASE("cached_attention: bits depend on a sequence alone") {
  for_each_backend([&](const Execution& execution) {
    for (const Shape& shape : kShapes) {
      const Result shared =
          Problem(shape, {.positions = {310, 450}, .prefixes = {300, 300}}, Scalar::bf16).run(execution);
      const Result apart =
          Problem(shape, {.positions = {310, 450, 20}, .prefixes = {17, 0, 20}, .shared = false, .filler = 5},
                  Scalar::bf16)
              .run(execution);
      for (const std::size_t row : {0, 1}) CHECK(row_of(shared, row, shape) == row_of(apart, row, shape));
    }
  });
}

TEST_CASE("cached_attention: a row has the same bits alone and among many sequences") {
  // On a large GPU blocks have eight warps alone and two among 90 rows; alone, two blocks share the longer sequence.
  const Shape shape{8, 8, 8};
  for_each_backend([&](const Execution& execution) {
    for (const std::int32_t position : {290, 1290}) {
      const Result alone = Problem(shape, {.positions = {position}, .prefixes = {280}}, Scalar::bf16).run(execution);
      for (const int rows : {5, 20, 90, 270}) {
        CAPTURE(position);
        CAPTURE(rows);
        Layout layout;
        for (int i = 0; i < rows; ++i) {
          layout.positions.push_back(i == 0 ? position : 5 + 97 * i % 294);
          layout.prefixes.push_back(std::min(280, layout.positions.back()));
        }
        const Problem problem(shape, layout, Scalar::bf16);
        const Result result = problem.run(execution);
        CHECK(row_of(result, 0, shape) == row_of(alone, 0, shape));
        CHECK(problem.stores(result));
        for (int i = 0; i < rows; ++i)
          CHECK(relative_error(row_of(result, i, shape), problem.expected(i)) <= row_tolerance(Scalar::bf16));
      }
    }
  });
}

TEST_CASE("cached_attention leaves sequences that do not run") {
  const Shape shape{4, 2, 64};
  for_each_backend([&](const Execution& execution) {
    Problem problem(shape, {.positions = {310, 450, 20}, .prefixes = {300, 300, 10}}, Scalar::bf16);
    problem.sequences()[1].end = 450;
    const Result result = problem.run(execution);
    CHECK(problem.stores(result));
    CHECK(row_of(result, 1, shape) == std::vector<float>(static_cast<std::size_t>(shape.query_columns())));
    CHECK(relative_error(row_of(result, 2, shape), problem.expected(2)) <= row_tolerance(Scalar::bf16));
  });
}

TEST_CASE("store_rows copies rows to their places and leaves out those without one") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : kRowTypes)
      for (const std::int64_t columns : {1, 40, 300}) {
        const Rows in(random_floats(5 * columns, 3), 5, columns, type, {3, 2});
        const Rows out(std::vector<float>(static_cast<std::size_t>(7 * columns), 4.0f), 7, columns, type, {8, 0});
        const std::vector<std::int64_t> to = {6, -1, 0, 2, -1};
        store_rows(execution, in.view(), DeviceArray<std::int64_t>(to).array(), out.view());
        std::vector<float> want(static_cast<std::size_t>(7 * columns), 4.0f);
        const std::vector<float> x = in.values();
        for (std::size_t i = 0; i < to.size(); ++i)
          if (to[i] >= 0)
            std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(i) * columns, columns, want.begin() + to[i] * columns);
        CHECK(out.values() == want);
      }
  });
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// Attention to all rows of a text: agrees with its definition in float64, and a text does not depend on the others.
#include "kernels/language/attention/text_attention.hpp"

#include "kernels/language/attention/attention_shape.hpp"
#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {
namespace {

using namespace weft::kernels;

struct Shape {
  std::int64_t heads, head_size;
};

std::vector<double> by_definition(const Shape& shape, const std::vector<TextRows>& texts, float scale,
                                  const std::vector<float>& q, const std::vector<float>& k,
                                  const std::vector<float>& v) {
  const std::int64_t width = shape.heads * shape.head_size;
  std::vector<double> out(q.size());
  for (std::int64_t row = 0; row < std::ssize(texts); ++row)
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      std::vector<double> weights;
      double largest = -1e300, total = 0;
      for (std::int64_t key = texts[row].begin; key < texts[row].end; ++key) {
        double product = 0;
        for (std::int64_t c = 0; c < shape.head_size; ++c) {
          const std::int64_t column = head * shape.head_size + c;
          product += static_cast<double>(q[row * width + column]) * k[key * width + column];
        }
        weights.push_back(scale * product);
        largest = std::max(largest, weights.back());
      }
      for (double& weight : weights) total += weight = std::exp(weight - largest);
      for (std::int64_t c = 0; c < shape.head_size; ++c) {
        double sum = 0;
        for (std::size_t i = 0; i < weights.size(); ++i)
          sum += weights[i] * v[(texts[row].begin + static_cast<std::int64_t>(i)) * width + head * shape.head_size + c];
        out[row * width + head * shape.head_size + c] = sum / total;
      }
    }
  return out;
}

}  // namespace

TEST_CASE("attention to a text agrees with float64, for texts shorter and longer than a block of keys") {
  for_each_backend([&](const Execution& execution) {
    int margins = 0;
    for (const Shape shape : {Shape{1, 8}, {3, 32}, {2, 20}, {1, kLargestHead}})
      for (const Scalar type : kRowTypes) {
        CAPTURE(shape.head_size);
        std::vector<TextRows> texts;
        for (const std::int64_t size : {1, 64, 3, 65, 200})
          texts.insert(texts.end(), static_cast<std::size_t>(size), {std::ssize(texts), std::ssize(texts) + size});
        const std::int64_t rows = std::ssize(texts), width = shape.heads * shape.head_size;
        const Margins margin = kMargins[margins++ % 3];
        const auto made = [&](std::uint64_t seed) {
          return Rows(random_floats(rows * width, seed, 2.0f), rows, width, type, margin);
        };
        const Rows q = made(1), k = made(2), v = made(3), out(rows, width, type, margin);
        const float scale = 1 / std::sqrt(static_cast<float>(shape.head_size));
        const DeviceArray<TextRows> of_rows(texts);
        text_attention(execution, {shape.heads, shape.head_size, scale, of_rows.array()}, q.view(), k.view(), v.view(),
                       out.view());
        CHECK(relative_error(out.values(), by_definition(shape, texts, scale, q.values(), k.values(), v.values())) <=
              row_tolerance(type));

        // The last text alone has the same bits.
        const std::int64_t first = rows - 200;
        const auto last = [&](const Rows& all) {
          const std::vector<float> values = all.values();
          return Rows({values.begin() + first * width, values.end()}, 200, width, type);
        };
        const Rows alone(200, width, type);
        const DeviceArray<TextRows> one(std::vector<TextRows>(200, {0, 200}));
        text_attention(execution, {shape.heads, shape.head_size, scale, one.array()}, last(q).view(), last(k).view(),
                       last(v).view(), alone.view());
        CHECK(alone.values() == last(out).values());
      }
  });
}

}  // namespace weft::testing

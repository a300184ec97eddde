// SPDX-License-Identifier: Apache-2.0
//
// The tensor-core kernels of products of examples, run on the host by an emulated block: layouts of fragments,
// swizzles, barriers and sums are those of the GPU; only the instructions are emulated.
#include "kernels/privacy/tiles.hpp"

#include "kernels/privacy/hopper_products.hpp"
#include "tests/kernels/language/emulated_block.hpp"
#include "tests/kernels/privacy/example_gradients.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// 16-bit rows in memory of the host, aligned as the kernels require, with columns after the last that are NaN.
template <class Number>
struct Rows {
  std::int64_t columns, stride;
  std::vector<FlashWord> words;

  Rows(const std::vector<float>& values, std::int64_t rows, std::int64_t columns_)
      : columns(columns_), stride(columns_ + 8), words(static_cast<std::size_t>(rows * stride / 8)) {
    std::memset(words.data(), 0xff, words.size() * sizeof(FlashWord));
    for (std::int64_t i = 0; i < rows * columns; ++i)
      data()[i / columns * stride + i % columns] = from_float<Number>(values[i]).bits;
  }
  std::uint16_t* data() { return reinterpret_cast<std::uint16_t*>(words.data()); }
  TileMatrix view() { return {data(), columns, stride}; }
  /// Without the columns after the last.
  std::vector<float> values() {
    std::vector<float> out;
    for (std::int64_t i = 0; i < std::ssize(words) * 8; ++i)
      if (i % stride < columns) out.push_back(Number{data()[i]});
    return out;
  }
};

template <class Context, class Body>
void run_blocks(std::int64_t tasks, std::int64_t shared, bool reversed, const Body& body) {
  for (std::int64_t task = 0; task < tasks; ++task)
    EmulatedBlock(kTileThreads, shared, reversed, [&](EmulatedContext& given) {
      Context context(given);
      body(context, task);
    });
}

/// Sums of `each` parts.
std::vector<double> sums_of(const std::vector<double>& parts, std::int64_t each) {
  std::vector<double> sums(parts.size() / static_cast<std::size_t>(each));
  for (std::size_t i = 0; i < parts.size(); ++i) sums[i / static_cast<std::size_t>(each)] += parts[i];
  return sums;
}

struct Case {
  std::int64_t in, out;
  std::vector<std::int64_t> lengths;
};
/// A part of a tile with empty examples and some of few rows; several tiles, the last not full, and four stages.
const std::vector<Case> kCases = {{8, 16, {40, 0, 3, 33}}, {136, 264, {97}}};

template <class Context>
void check_direct(const Case& c, bool reversed) {
  using Number = typename Context::Number;
  const TestExamples examples(c.lengths, 1);
  const Examples view = examples.view();
  const std::int64_t rows = examples.rows(), count = examples.count();
  Rows<Number> x(random_floats(rows * c.in, 1), rows, c.in), g(random_floats(rows * c.out, 2), rows, c.out);
  const std::vector<Gradient> gradients = product_gradients(x.values(), c.in, g.values(), c.out, c.out, examples);
  const std::int64_t tiles = direct_tiles(x.view(), g.view()), least = 2;
  std::vector<double> parts(static_cast<std::size_t>(count * tiles), NAN);
  const DirectTiles a{x.view(), g.view(), view.offsets.data(), least, parts.data()};
  run_blocks<Context>(count * tiles, kRowProductShared, reversed,
                      [&](Context& context, std::int64_t task) { form_direct_tile(context, a, task); });
  std::vector<double> expected = squared_norms(gradients);
  for (std::int64_t e = 0; e < count; ++e)
    if (examples.end(e) - examples.begin(e) <= least) expected[e] = 0;
  CHECK(largest_relative_error(sums_of(parts, tiles), expected) <= 1e-6);
}

template <class Context>
void check_gram(const Case& c, bool reversed) {
  using Number = typename Context::Number;
  const TestExamples examples(c.lengths, 1);
  const Examples view = examples.view();
  const std::int64_t rows = examples.rows(), count = examples.count();
  Rows<Number> x(random_floats(rows * c.in, 1), rows, c.in), g(random_floats(rows * c.out, 2), rows, c.out);
  const std::int64_t side = tiles_of(view.most_rows()), pairs = gram_pairs(side), least = 2;
  std::vector<double> parts(static_cast<std::size_t>(count * pairs), NAN);
  const GramPairs a{x.view(), g.view(), view.offsets.data(), least, side, 0x1p-20, parts.data()};
  run_blocks<Context>(count * pairs, kColumnProductShared, reversed,
                      [&](Context& context, std::int64_t task) { form_gram_pair(context, a, task); });
  std::vector<double> expected = squared_norms(product_gradients(x.values(), c.in, g.values(), c.out, c.out, examples));
  for (std::int64_t e = 0; e < count; ++e)
    if (examples.end(e) - examples.begin(e) <= least) expected[e] = 0;
  // The bound of the error that is added is 2^-20 of the terms without their signs: for few rows, about the norm.
  CHECK(largest_relative_error(sums_of(parts, pairs), expected) <= 2e-5);
}

template <class Context>
void check_weighed(const Case& c, std::int64_t slices, bool reversed) {
  using Number = typename Context::Number;
  const TestExamples examples(c.lengths, 1);
  const Examples view = examples.view();
  const std::int64_t rows = examples.rows(), count = examples.count(), size = c.in * c.out;
  std::vector<float> inputs = random_floats(rows * c.in, 1), gradients = random_floats(rows * c.out, 2), factors;
  for (std::int64_t e = 0; e < count; ++e) factors.push_back(e == 1 ? 0.0f : 0.3f + static_cast<float>(e));
  for (std::int64_t i = examples.begin(1) * c.in; i < examples.end(1) * c.in; ++i) inputs[i] = std::nanf("");
  Rows<Number> x(inputs, rows, c.in), g(gradients, rows, c.out);
  std::vector<float> sums(static_cast<std::size_t>(slices * size), std::nanf(""));
  const WeighedTiles a{x.view(), g.view(), view.offsets.data(), count, factors.data(), slices, sums.data()};
  run_blocks<Context>(slices * direct_tiles(x.view(), g.view()), kRowProductShared, reversed,
                      [&](Context& context, std::int64_t task) { form_weighed_tile(context, a, task); });
  const std::vector<Gradient> of_examples = product_gradients(x.values(), c.in, g.values(), c.out, c.out, examples);
  double worst = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    double expected = 0, got = 0;
    for (std::int64_t e = 0; e < count; ++e)
      if (factors[e] != 0) expected += static_cast<double>(factors[e]) * of_examples[e][i];
    for (std::int64_t s = 0; s < slices; ++s) got += static_cast<double>(sums[s * size + i]);
    worst = std::isnan(got) ? HUGE_VAL : std::max(worst, std::abs(got - expected));
  }
  // At most 100 products of magnitude 1, times factors of at most 3.3 for four examples.
  CHECK(worst <= 100 * 100 * kRoundoff * 8);
}

}  // namespace

TEST_CASE("squares of per-example gradients on emulated tensor cores") {
  check_direct<EmulatedContext>(kCases[0], false);
  check_direct<EmulatedHalfContext>(kCases[0], true);
  check_direct<EmulatedContext>(kCases[1], true);
}

TEST_CASE("pairs of Gram tiles on emulated tensor cores") {
  const Case small{8, 16, {9, 0, 2}}, large{72, 136, {140}};
  check_gram<EmulatedContext>(small, false);
  check_gram<EmulatedHalfContext>(small, true);
  check_gram<EmulatedContext>(large, true);
}

TEST_CASE("sums of weighed gradients on emulated tensor cores: an example of factor 0 is not read") {
  check_weighed<EmulatedContext>(kCases[0], 1, false);
  check_weighed<EmulatedHalfContext>(kCases[0], 2, true);
}

TEST_CASE("tiles that blocks share: every range is formed once, and added in the order of its rows") {
  for (const std::int64_t tiles : {1, 18, 54, 72, 97, 131, 132, 133, 192, 1024, 1179})
    for (const std::int64_t stages : {1, 8, 32, 128, 256, 1000}) {
      CAPTURE(tiles);
      CAPTURE(stages);
      const HopperShares shares = hopper_shares(tiles, stages);
      if (shares.tiles == 0) continue;
      CHECK(shares.tiles == tiles % kHopperWorkers);
      CHECK(shares.workers() <= kHopperWorkers);
      struct Part {
        std::int64_t tile = -1;
        std::vector<std::int64_t> ranges;
      };
      std::vector<Part> parts(static_cast<std::size_t>(2 * shares.workers()));
      for (std::int64_t worker = 0; worker < shares.workers(); ++worker)
        for (std::int64_t range = shares.first_range(worker); range < shares.first_range(worker) + shares.units;
             ++range) {
          Part& part = parts[static_cast<std::size_t>(shares.part_of(worker, range))];
          CHECK((part.tile < 0 || part.tile == shares.tile_of(worker, range)));
          part.tile = shares.tile_of(worker, range);
          part.ranges.push_back(range % shares.cuts);
        }
      for (std::int64_t tile = 0; tile < shares.tiles; ++tile) {
        std::int64_t next = 0;
        shares.for_each_part(tile, [&](std::int64_t number) {
          const Part& part = parts[static_cast<std::size_t>(number)];
          CHECK(part.tile == tile);
          for (const std::int64_t range : part.ranges) CHECK(range == next++);
        });
        CHECK(next == shares.cuts);
      }
    }
  // The shapes of GPT-2 124M with 16 x 1024 rows, and whole tiles where those fill the last round well.
  CHECK(hopper_shares(hopper_tiles(768, 768), 256).workers() == 126);
  CHECK(hopper_shares(hopper_tiles(768, 50304), 32).tiles == 0);
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
#include "model/gradient_sink.hpp"

#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "tests/kernels/support.hpp"

namespace weft::model {
namespace {

using kernels::Scalar;
using kernels::StorageType;
using weft::testing::DeviceArray;
using weft::testing::execution;
using weft::testing::kRoundoff;
using weft::testing::random_floats;
using weft::testing::TestMatrix;
using Form = GradientRows::Form;

constexpr std::int64_t kIn = 300, kOut = 70, kIds = 11, kWidth = 260;  // more than one chunk of columns
enum Parameter : std::size_t { kWeight, kTransposed, kBias, kGain, kEmbedding, kParameters };

Parameters make_parameters(const parallel::GridShape& grid = {}, std::int64_t rank = 0,
                           std::span<const Parameter> frozen = {}) {
  const Cut rows{0, parallel::kTensorAxis}, columns{1, parallel::kTensorAxis};
  std::vector<ParameterSpec> specs = {{.name = "weight", .shape = {kOut, kIn}, .cut = rows},
                                      {.name = "transposed", .shape = {kOut, kIn}, .cut = columns},
                                      {.name = "bias", .shape = {kOut}},
                                      {.name = "gain", .shape = {kIn}},
                                      {.name = "embedding", .shape = {kIds, kWidth}, .cut = rows}};
  for (const Parameter parameter : frozen) specs[parameter].frozen = true;
  number_elements(specs);
  return Parameters(std::move(specs), StorageType::bf16, grid, rank, execution(), Moments::none);
}

/// The rows of one micro-batch. Ids repeat.
struct Batch {
  std::int64_t n;
  TestMatrix x, g, h, e;  // [n, in], [n, out], [n, in], [n, width]
  std::vector<std::uint32_t> ids;
  DeviceArray<std::uint32_t> device_ids;

  Batch(std::int64_t rows, std::uint64_t stream, Scalar type)
      : n(rows),
        x(random_floats(rows * kIn, stream), rows, kIn, type),
        g(random_floats(rows * kOut, stream + 1), rows, kOut, type),
        h(random_floats(rows * kIn, stream + 2), rows, kIn, type),
        e(random_floats(rows * kWidth, stream + 3), rows, kWidth, type) {
    for (std::int64_t i = 0; i < rows; ++i) ids.push_back(static_cast<std::uint32_t>(i * i % (kIds - 1)));
    device_ids = DeviceArray<std::uint32_t>(ids);
  }

  void give(GradientSink& sink, const kernels::Examples& examples = {}) const {
    sink.take({Form::product, kWeight, x.view(), g.view(), {}, examples});
    sink.take({Form::product, kTransposed, x.view(), g.view(), {}, examples});
    sink.take({Form::column_sum, kBias, {}, g.view(), {}, examples});
    sink.take({Form::column_product, kGain, x.view(), h.view(), {}, examples});
    sink.take({Form::lookup, kEmbedding, {}, e.view(), device_ids.array(), examples});
    sink.end_micro_batch();
  }
};

std::vector<float> values(const AccumulatingSink& sink, const Parameters& parameters, std::size_t parameter) {
  const bool matrix = parameters.specs()[parameter].is_matrix();
  const std::int64_t size =
      matrix ? sink.matrix(parameter).rows * sink.matrix(parameter).columns : sink.vector(parameter).size;
  std::vector<float> out(static_cast<std::size_t>(size));
  device::copy(execution(), out.data(), matrix ? sink.matrix(parameter).data : sink.vector(parameter).data, 4 * size,
               device::Direction::to_host);
  kernels::fence(execution());
  return out;
}

/// Sums in fp64 with the sums of magnitudes, which bound the rounding errors.
struct Reference {
  std::vector<double> sum, magnitude;
  explicit Reference(std::int64_t size) : sum(static_cast<std::size_t>(size)), magnitude(sum.size()) {}
  void add(std::int64_t at, double value) {
    sum[static_cast<std::size_t>(at)] += value;
    magnitude[static_cast<std::size_t>(at)] += std::abs(value);
  }
};

std::vector<Reference> references(std::span<const Batch> batches) {
  std::vector<Reference> out = {Reference(kOut * kIn), Reference(kIn * kOut), Reference(kOut), Reference(kIn),
                                Reference(kIds * kWidth)};
  for (const Batch& batch : batches) {
    const std::vector<float> x = batch.x.values(), g = batch.g.values(), h = batch.h.values(), e = batch.e.values();
    for (std::int64_t n = 0; n < batch.n; ++n) {
      for (std::int64_t o = 0; o < kOut; ++o) {
        const double gradient = g[n * kOut + o];
        for (std::int64_t i = 0; i < kIn; ++i) {
          out[kWeight].add(o * kIn + i, gradient * x[n * kIn + i]);
          out[kTransposed].add(i * kOut + o, gradient * x[n * kIn + i]);
        }
        out[kBias].add(o, gradient);
      }
      for (std::int64_t i = 0; i < kIn; ++i) out[kGain].add(i, static_cast<double>(x[n * kIn + i]) * h[n * kIn + i]);
      for (std::int64_t c = 0; c < kWidth; ++c) out[kEmbedding].add(batch.ids[n] * kWidth + c, e[n * kWidth + c]);
    }
  }
  return out;
}

/// Stores the rows and forms the gradients at the end of the micro-batch: the interface suffices for it.
class StoringSink final : public GradientSink {
 public:
  explicit StoringSink(GradientSink& later) : later_(later) {}
  void take(const GradientRows& rows) override { stored_.push_back(rows); }
  void end_micro_batch() override {
    for (const GradientRows& rows : stored_) later_.take(rows);
    stored_.clear();
  }

 private:
  GradientSink& later_;
  std::vector<GradientRows> stored_;
};

/// Squared norms of the gradient of a bias, by example. On the host.
class BiasNorms final : public GradientSink {
 public:
  std::vector<double> squared_norm;
  void take(const GradientRows& rows) override {
    if (rows.form != Form::column_sum) return;
    const std::span<const std::int64_t> examples = rows.examples.offsets;
    std::vector<float> g(static_cast<std::size_t>(rows.gradients.rows * rows.gradients.columns));
    device::copy(execution(), g.data(), rows.gradients.data, 4 * std::ssize(g), device::Direction::to_host);
    kernels::fence(execution());
    for (std::size_t e = 0; e + 1 < examples.size(); ++e) {
      double squares = 0;
      for (std::int64_t o = 0; o < rows.gradients.columns; ++o) {
        double sum = 0;
        for (std::int64_t n = examples[e]; n < examples[e + 1]; ++n) sum += g[n * rows.gradients.columns + o];
        squares += sum * sum;
      }
      squared_norm.push_back(squares);
    }
  }
};

}  // namespace

TEST_CASE("gradients of all forms agree with a float64 loop, and micro-batches accumulate") {
  const Parameters parameters = make_parameters();
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    const Batch batches[] = {Batch(1, 1, type), Batch(301, 11, type), Batch(64, 21, type)};
    AccumulatingSink sink(parameters, execution(), 301);
    for (const int times : {0, 1}) {  // cleared, the sum starts again
      if (times > 0) sink.clear();
      for (const Batch& batch : batches) batch.give(sink);
    }
    const std::vector<Reference> expected = references(batches);
    for (std::size_t p = 0; p < kParameters; ++p) {
      CAPTURE(parameters.specs()[p].name);
      const std::vector<float> got = values(sink, parameters, p);
      REQUIRE(got.size() == expected[p].sum.size());
      double worst = 0;  // in units of the bound: a product and at most 366 + 3 additions each round once
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double bound = (366 + 3 + 1) * kRoundoff * expected[p].magnitude[i];
        worst = std::max(worst, std::abs(got[i] - expected[p].sum[i]) / (bound + 1e-30));
      }
      CHECK(worst <= 1);
    }
  }
}

TEST_CASE("the same rows give the same bits, also when ids repeat") {
  const Parameters parameters = make_parameters();
  const Batch batch(517, 3, Scalar::fp32);
  AccumulatingSink first(parameters, execution(), batch.n), second(parameters, execution(), batch.n);
  batch.give(first);
  batch.give(second);
  StoringSink stored(second);
  second.clear();
  batch.give(stored);
  for (std::size_t p = 0; p < kParameters; ++p) CHECK((values(first, parameters, p) == values(second, parameters, p)));
}

TEST_CASE("a cleared gradient is that of the next rows, or zero where there are none") {
  const Parameters parameters = make_parameters();
  const Batch batch(40, 5, Scalar::bf16);
  AccumulatingSink fresh(parameters, execution(), batch.n), used(parameters, execution(), batch.n);
  batch.give(fresh);
  for (int i = 0; i < 2; ++i) batch.give(used);
  used.clear();
  batch.give(used);
  for (std::size_t p = 0; p < kParameters; ++p) CHECK((values(fresh, parameters, p) == values(used, parameters, p)));
  used.clear();
  used.take({Form::column_sum, kBias, {}, batch.g.view()});
  used.end_micro_batch();
  for (std::size_t p = 0; p < kParameters; ++p) {
    CAPTURE(parameters.specs()[p].name);
    const std::vector<float> got = values(used, parameters, p);
    if (p == kBias)
      CHECK((got == values(fresh, parameters, p)));
    else
      CHECK(std::ranges::all_of(got, [](float value) { return value == 0.0f; }));
  }
}

TEST_CASE("frozen parameters have no gradients, and those of the others stay the same") {
  const Parameter frozen[] = {kWeight, kGain, kEmbedding};
  const Parameters all = make_parameters(), some = make_parameters({}, 0, frozen);
  const Batch batch(40, 5, Scalar::fp32);
  AccumulatingSink expected(all, execution(), batch.n), sink(some, execution(), batch.n);
  batch.give(expected);
  batch.give(sink);
  for (const Parameter p : {kTransposed, kBias}) CHECK((values(sink, some, p) == values(expected, all, p)));
  // The matrix, then the vector, each in whole rows of kRow.
  CHECK(AccumulatingSink::elements(some.specs(), {}, 0) == 6 * AccumulatingSink::kRow + AccumulatingSink::kRow);
  CHECK(AccumulatingSink::vector_elements(some.specs(), {}, 0) == kOut);
  sink.clear();
  sink.end_micro_batch();
  for (const float value : values(sink, some, kTransposed)) CHECK(value == 0);
}

TEST_CASE("a rank forms the gradients of its part") {
  const Parameters whole = make_parameters();
  const Batch batch(130, 5, Scalar::fp32);
  AccumulatingSink of_whole(whole, execution(), batch.n);
  batch.give(of_whole);
  const parallel::GridShape grid({{"data", 1}, {"tensor", 3}});
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const Parameters part = make_parameters(grid, rank);
    AccumulatingSink sink(part, execution(), batch.n);
    const parallel::Range out = part.parts(kWeight).held, in = part.parts(kTransposed).held,
                          ids = part.parts(kEmbedding).held;
    sink.take({Form::product, kWeight, batch.x.view(), batch.g.view().columns_from(out.begin, out.size())});
    sink.take({Form::product, kTransposed, batch.x.view().columns_from(in.begin, in.size()), batch.g.view()});
    sink.take({Form::lookup, kEmbedding, {}, batch.e.view(), batch.device_ids.array()});
    const auto check = [&](std::size_t p, parallel::Range rows, std::int64_t columns, double tolerance) {
      const std::vector<float> all = values(of_whole, whole, p), own = values(sink, part, p);
      REQUIRE(std::ssize(own) == rows.size() * columns);
      for (std::size_t i = 0; i < own.size(); ++i)
        CHECK(std::abs(own[i] - all[static_cast<std::size_t>(rows.begin * columns) + i]) <= tolerance);
    };
    // The dense library orders the sum of 130 products of numbers below 1 by the shape of the matrix.
    check(kWeight, out, kIn, 130 * 130 * kRoundoff);
    check(kTransposed, in, kOut, 130 * 130 * kRoundoff);
    check(kEmbedding, ids, kWidth, 0);
  }
}

TEST_CASE("the gradients of a matrix that a rank owns whole are those of its held rows") {
  // Members of a group follow one another without alignment: here 48 numbers after a multiple of 64.
  std::vector<ParameterSpec> specs = {{.name = "gate", .shape = {6, 8}, .group = "gate_up"},
                                      {.name = "up", .shape = {6, 8}, .group = "gate_up"},
                                      {.name = "down", .shape = {8, 6}}};
  number_elements(specs);
  const Parameters parameters(std::move(specs), StorageType::bf16, {}, 0, execution(), Moments::none);
  const AccumulatingSink sink(parameters, execution(), 10);
  for (std::size_t i = 0; i < parameters.size(); ++i) CHECK(sink.matrix(i).data == sink.held(i).data);
}

TEST_CASE("what several ranks hold lies in rows of its own, so that a norm over the ranks can count it once") {
  // Sizes that are no multiples of a row of numbers; the matrix that nothing cuts lies between others.
  std::vector<ParameterSpec> specs = {{.name = "tokens", .shape = {90, 61}, .cut = {0, parallel::kTensorAxis}},
                                      {.name = "positions", .shape = {70, 61}},
                                      {.name = "gain", .shape = {61}},
                                      {.name = "weight", .shape = {90, 61}, .cut = {0, parallel::kTensorAxis}},
                                      {.name = "temperature", .shape = {7}, .partial_gradient = true},
                                      {.name = "bias", .shape = {90}, .cut = {0, parallel::kTensorAxis}}};
  number_elements(specs);
  const std::int64_t n = 3;
  for (const std::int64_t ranks : {1, 2}) {
    const parallel::GridShape grid({{"data", 1}, {"tensor", ranks}});
    const Parameters parameters(specs, StorageType::fp32, grid, 0, execution(), Moments::none);
    AccumulatingSink sink(parameters, execution(), n);
    double whole = 0, all = 0;  // squares
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const std::int64_t held = parameters.parts(i).held.size();
      const TestMatrix x(random_floats(n * specs[i].columns(), 2 * i), n, specs[i].columns(), Scalar::fp32),
          g(random_floats(n * held, 2 * i + 1), n, held, Scalar::fp32);
      sink.take({specs[i].is_matrix() ? Form::product : Form::column_sum, i, x.view(), g.view()});
      double squares = 0;
      for (const float value : values(sink, parameters, i)) squares += static_cast<double>(value) * value;
      all += squares;
      if (specs[i].cut.over.empty()) whole += squares;
    }
    std::vector<double> rows;
    for (const kernels::Matrix<const float>& part : {sink.matrix_rows(), sink.vector_rows()}) {
      std::vector<float> numbers(static_cast<std::size_t>(part.rows * part.columns));
      device::copy(execution(), numbers.data(), part.data, 4 * std::ssize(numbers), device::Direction::to_host);
      kernels::fence(execution());
      for (std::size_t at = 0; at < numbers.size(); ++at) {
        if (at % AccumulatingSink::kRow == 0) rows.push_back(0);
        rows.back() += static_cast<double>(numbers[at]) * numbers[at];
      }
    }
    double counted = 0, repeated = 0;
    for (const double row : rows) counted += row;
    for (const parallel::Range& range : sink.repeated_rows())
      for (std::int64_t row = range.begin; row < range.end; ++row) repeated += rows[static_cast<std::size_t>(row)];
    CHECK(counted == doctest::Approx(all).epsilon(1e-12));
    CHECK(repeated == doctest::Approx(ranks == 1 ? 0 : whole).epsilon(1e-12));  // one rank repeats nothing
    double partial = 0, temperature = 0;
    std::vector<float> vector(static_cast<std::size_t>(sink.partial_vectors().size));
    device::copy(execution(), vector.data(), sink.partial_vectors().data, 4 * std::ssize(vector),
                 device::Direction::to_host);
    kernels::fence(execution());
    for (const float value : vector) partial += static_cast<double>(value) * value;
    for (const float value : values(sink, parameters, 4)) temperature += static_cast<double>(value) * value;
    CHECK(partial == doctest::Approx(ranks == 1 ? 0 : temperature).epsilon(1e-12));
  }
}

TEST_CASE("the planned bytes are the allocated bytes") {
  const parallel::GridShape grid({{"data", 2}, {"tensor", 3}});
  for (std::int64_t rank = 0; rank < grid.ranks(); ++rank) {
    const Parameters parameters = make_parameters(grid, rank);
    const std::int64_t before = device::memory_use().device_bytes;
    const AccumulatingSink sink(parameters, execution(), 100);
    CHECK(device::memory_use().device_bytes - before == AccumulatingSink::bytes(parameters.specs(), grid, rank, 100));
  }
}

TEST_CASE("rows carry the boundaries of examples") {
  const Batch batch(6, 7, Scalar::fp32);
  const std::vector<std::int64_t> offsets = {0, 1, 1, 4, 6};
  const DeviceArray<std::int64_t> on_device(offsets);
  BiasNorms norms;
  batch.give(norms, {.offsets = offsets, .device_offsets = on_device.array()});
  REQUIRE(norms.squared_norm.size() == 4);
  CHECK(norms.squared_norm[1] == 0);  // an example without rows
  const std::vector<float> g = batch.g.values();
  double expected = 0;
  for (std::int64_t o = 0; o < kOut; ++o) {
    double sum = 0;
    for (std::int64_t n = 1; n < 4; ++n) sum += g[n * kOut + o];
    expected += sum * sum;
  }
  CHECK(norms.squared_norm[2] == doctest::Approx(expected));
}

TEST_CASE("the gain of a norm takes the rows before the norm with their statistics") {
  const Parameters parameters = make_parameters();
  const Batch batch(200, 7, Scalar::bf16);
  const DeviceArray<float> shift(random_floats(batch.n, 41)), scale(random_floats(batch.n, 42));
  AccumulatingSink sink(parameters, execution(), batch.n);
  GradientRows rows{Form::column_product, kGain, batch.x.view(), batch.h.view()};
  rows.row_shift = shift.array();
  rows.row_scale = scale.array();
  sink.take(rows);
  const std::vector<float> x = batch.x.values(), h = batch.h.values(), mean = shift.values(), inverse = scale.values(),
                           got = values(sink, parameters, kGain);
  for (std::int64_t i = 0; i < kIn; ++i) {
    double sum = 0;
    for (std::int64_t n = 0; n < batch.n; ++n)
      sum += (static_cast<double>(x[n * kIn + i]) - mean[n]) * inverse[n] * h[n * kIn + i];
    REQUIRE(std::abs(got[i] - sum) <= 200 * 2 * 130 * kRoundoff);  // 200 terms below 2, 128 + 2 additions
  }
  rows.row_scale.size = batch.n - 1;
  CHECK_THROWS_AS(sink.take(rows), Error);
}

TEST_CASE("rows that do not fit their parameter are refused") {
  const Parameters parameters = make_parameters();
  const Batch batch(4, 9, Scalar::fp32);
  AccumulatingSink sink(parameters, execution(), batch.n);
  CHECK_THROWS_AS(sink.take({Form::product, kWeight, batch.g.view(), batch.x.view()}), Error);
  CHECK_THROWS_AS(sink.take({Form::column_sum, kWeight, {}, batch.g.view()}), Error);
  CHECK_THROWS_AS(sink.take({Form::lookup, kEmbedding, {}, batch.e.view(), {}}), Error);
  CHECK_THROWS_AS(sink.take({Form::product, kWeight, batch.x.view(), batch.g.view().rows_from(0, 3)}), Error);
}

}  // namespace weft::model

// SPDX-License-Identifier: Apache-2.0
//
// Logits, loss and gradients of tiny random models against those of the transformers library, which
// tests/reference/make_language_fixtures.py recorded.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "input/read.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/step/transformer.hpp"
#include "parallel/grid.hpp"
#include "storage/tensor_file.hpp"
#include "tests/kernels/support.hpp"

namespace weft::language_model {
namespace {

using kernels::Scalar;
using testing::DeviceArray;
using testing::execution;

struct Recorded {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

/// A recorded model. Matrices are [outputs, inputs].
class Fixture {
 public:
  explicit Fixture(const std::string& name) {
    const storage::Lock lock;
    file_ = storage::open_file(std::string(WEFT_LANGUAGE_FIXTURES) + "/" + name + ".h5");
    const auto settings = nlohmann::json::parse(storage::read_text_attribute(file_, "language_model"));
    std::string text = "[language_model]\n";
    for (const auto& [key, value] : settings.items()) text += key + " = " + value.dump() + "\n";
    Configuration configuration;
    input::Schema keys = schema(configuration);
    input::read(keys, "[data]\ntrain = \"unused\"\n" + text, name);
    architecture.model = configuration.language_model;
    const Recorded first = read("logits");
    sequences = first.shape[0], length = first.shape[1];
    architecture.vocabulary = first.shape[2];
    architecture.positions = length;
    ids = integers<std::uint32_t>("ids");
    targets = integers<std::int32_t>("targets");
  }

  Recorded read(const std::string& path) const {
    const storage::Lock lock;
    const storage::Handle dataset(H5Dopen2(file_, path.c_str(), H5P_DEFAULT), H5Dclose, path);
    Recorded out{storage::shape_of(dataset), {}};
    out.values.resize(static_cast<std::size_t>(
        std::accumulate(out.shape.begin(), out.shape.end(), std::int64_t{1}, std::multiplies<>())));
    storage::check(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.values.data()), path);
    return out;
  }

  Architecture architecture;
  std::int64_t sequences = 0, length = 0;
  std::vector<std::uint32_t> ids;
  std::vector<std::int32_t> targets;

 private:
  template <class T>
  std::vector<T> integers(const std::string& path) const {  // below 2^24: exact in fp32
    const std::vector<float> values = read(path).values;
    return {values.begin(), values.end()};
  }
  storage::Handle file_;
};

/// [rows, columns] -> [columns, rows]
std::vector<float> transposed(const std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  std::vector<float> out(values.size());
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) out[j * rows + i] = values[i * columns + j];
  return out;
}

void load(const Fixture& fixture, const model::Parameters& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const model::ParameterSpec& spec = parameters.specs()[i];
    const Recorded recorded = fixture.read("weights/" + spec.name);
    REQUIRE(recorded.shape == spec.shape);
    const DeviceArray<float> values(spec.transposed() ? transposed(recorded.values, spec.shape[0], spec.shape[1])
                                                      : recorded.values);
    if (spec.is_matrix())
      kernels::weights_from_float(execution(), parameters.matrix(i), 0, values.matrix(spec.rows(), spec.columns()));
    else
      device::copy(execution(), parameters.vector(i).weight.data, values.data(), 4 * values.size(),
                   device::Direction::to_device);
    kernels::fence(execution());
  }
}

struct Difference {
  double relative = 0;  ///< L2
  double absolute = 0;  ///< largest
  double cosine = 1;
};
Difference difference(const std::vector<float>& found, const std::vector<float>& expected) {
  REQUIRE(found.size() == expected.size());
  double apart = 0, a = 0, b = 0, product = 0, largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double x = found[i], y = expected[i];
    apart += (x - y) * (x - y), a += x * x, b += y * y, product += x * y;
    largest = std::max(largest, std::abs(x - y));
  }
  return {std::sqrt(apart / b), largest, product / std::sqrt(a * b)};
}

struct Tolerance {
  double loss, logits, matrices, vectors;  ///< relative; gradients of matrices and vectors
  double cosine;
  double key_bias;  ///< absolute: the exact gradient is 0 where no rotation follows
};

void compare(const std::string& name, Scalar type, const Tolerance& tolerance) {
  CAPTURE(name);
  const Fixture fixture(name);
  const parallel::Grid grid(testing::world(), single_process());
  const Model model(fixture.architecture, kernels::StorageType::fp32, grid.shape(), 0, execution(),
                    model::Moments::none);
  load(fixture, model.parameters());

  const std::int64_t rows = fixture.sequences * fixture.length;
  run::Timers timers;
  model::StepArena arena(execution(), grid);
  const TransformerSettings settings{.architecture = fixture.architecture,
                                     .type = type,
                                     .storage = kernels::StorageType::fp32,
                                     .rows = rows,
                                     .length = fixture.length,
                                     .memory = {.head_chunk = 29}};  // does not divide the 72 rows
  Transformer transformer(model, settings, timers, arena);
  model::AccumulatingSink sink(model.parameters(), execution(), rows);
  sink.clear();

  std::vector<std::int32_t> positions;
  for (std::int64_t row = 0; row < rows; ++row) positions.push_back(static_cast<std::int32_t>(row % fixture.length));
  const auto counted = static_cast<double>(
      std::count_if(fixture.targets.begin(), fixture.targets.end(), [](auto target) { return target >= 0; }));
  const DeviceArray<std::uint32_t> ids(fixture.ids);
  const DeviceArray<std::int32_t> targets(fixture.targets), places(positions);
  const DeviceArray<float> losses(rows), scale(std::vector<float>{static_cast<float>(1 / counted)});
  const Tokens tokens{.sequences = fixture.sequences,
                      .length = fixture.length,
                      .ids = ids.array(),
                      .targets = targets.array(),
                      .positions = places.array(),
                      .first_key = {},
                      .scale = scale.data()};

  transformer.prepare_weights();
  transformer.forward(tokens, nullptr);
  std::vector<float> logits;
  for (std::int64_t row = 0; row < rows; ++row)
    for (const float logit : transformer.logits(row)) logits.push_back(logit);
  transformer.losses_and_gradient(tokens, losses.array(), sink);
  transformer.backward(tokens, nullptr, sink);
  sink.end_micro_batch();
  kernels::fence(execution());

  CHECK(difference(logits, fixture.read("logits").values).relative <= tolerance.logits);
  const std::vector<float> each = losses.values();
  CHECK(std::accumulate(each.begin(), each.end(), 0.0) / counted ==
        doctest::Approx(fixture.read("loss").values.at(0)).epsilon(tolerance.loss));
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const model::ParameterSpec& spec = model.parameters().specs()[i];
    CAPTURE(spec.name);
    std::vector<float> found(static_cast<std::size_t>(spec.elements()));
    device::copy(execution(), found.data(), spec.is_matrix() ? sink.matrix(i).data : sink.vector(i).data,
                 4 * spec.elements(), device::Direction::to_host);
    kernels::fence(execution());
    if (spec.transposed()) found = transposed(found, spec.shape[1], spec.shape[0]);
    const Difference apart = difference(found, fixture.read("gradients/" + spec.name).values);
    if (spec.name.ends_with("key/bias")) {
      CHECK(apart.absolute <= tolerance.key_bias);
    } else {
      CHECK(apart.relative <= (spec.is_matrix() ? tolerance.matrices : tolerance.vectors));
      CHECK(apart.cosine >= tolerance.cosine);
    }
  }
}

}  // namespace

TEST_CASE("fp32: models of the transformers library") {
  // Two blocks are some 50 operations with sums of up to 72 terms: 1e-5 is 170 roundings of fp32.
  for (const char* name : {"gpt2", "llama", "qwen3", "olmo2", "families/qwen2", "families/phi3", "families/smollm3",
                           "families/gemma3_text", "families/gpt_neox"})
    compare(name, Scalar::fp32,
            {.loss = 1e-6, .logits = 1e-5, .matrices = 1e-5, .vectors = 1e-5, .cosine = 1 - 1e-9, .key_bias = 1e-7});
}

TEST_CASE("bf16 activations") {
  // Gains of norms are sums of terms that nearly cancel. On the same models PyTorch's autocast reaches 1.1e-2 for
  // logits and 3.0e-2 for gains.
  for (const char* name : {"gpt2", "llama", "qwen3", "olmo2"})
    compare(name, Scalar::bf16,
            {.loss = 3e-3, .logits = 1.5e-2, .matrices = 3e-2, .vectors = 4e-2, .cosine = 0.999, .key_bias = 1e-3});
}

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// An update whose state passes through device buffers block by block gives the bits of one whose state lies there, in
// every storage, whatever the size of a block, also when it is recorded.
#include "model/state_stream.hpp"

#include "kernels/optimize/adam.hpp"
#include "parallel/grid.hpp"
#include "tests/kernels/support.hpp"
#include "tests/model/registry_bits.hpp"

namespace weft::model {
namespace {

using kernels::StorageType;

/// One matrix is smaller than a block, the columns of one have several blocks of 8-bit moments.
std::vector<ParameterSpec> matrices() {
  std::vector<ParameterSpec> specs;
  const auto add = [&](const char* name, std::int64_t rows, std::int64_t columns) {
    specs.push_back(
        {.name = name, .shape = {rows, columns}, .initial = normal(0.1, kernels::Purpose::test), .weight_decay = true});
  };
  add("wide", 37, 304);
  add("small", 3, 16);
  add("tall", 211, 32);
  add("one", 1, 48);
  number_elements(specs);
  return specs;
}

const parallel::Grid& grid() {
  static const parallel::Grid one(testing::world(), parallel::GridShape({{"data", 1}}));
  return one;
}

/// The matrices, a gradient for each, and updates of them.
struct Matrices {
  Matrices(StorageType storage, const kernels::Execution& execution, Moments moments, std::int64_t block_bytes)
      : execution(execution),
        parameters(matrices(), storage, grid().shape(), 0, execution, moments),
        arena(execution, grid()),
        stream(execution, StateStream::Buffers(parameters.specs(), storage, arena, block_bytes)),
        constants(arena.take<kernels::AdamStep>(1)) {
    parameters.initialise(3);
    parameters.add_to(registry);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const ParameterSpec& spec = parameters.specs()[i];
      const std::vector<float> values = testing::random_floats(spec.elements(), 100 + i, 0.1f);
      gradients.emplace_back(spec.elements());
      device::copy(execution, gradients.back().data(), values.data(), 4 * spec.elements(),
                   device::Direction::to_device);
      kernels::fence(execution);
    }
  }
  void set(std::uint64_t step, bool withheld) {
    kernels::AdamStep values = testing::test_step();
    values.step = step;
    values.withheld = withheld ? 1 : 0;
    device::copy(execution, constants.data, &values, sizeof values, device::Direction::to_device);
    kernels::fence(execution);
  }
  void update() {
    const bool streams = parameters.moments() == Moments::on_host;
    if (streams) stream.begin();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const ParameterSpec& spec = parameters.specs()[i];
      const kernels::Matrix<const float> gradient = gradients[i].matrix(spec.rows(), spec.columns());
      if (streams)
        stream.update(parameters.owned_matrix(i), gradient, constants.data);
      else
        kernels::adam_rows(execution, parameters.owned_matrix(i), 0, gradient, constants.data);
    }
    if (streams) stream.end();
  }

  const kernels::Execution execution;
  Parameters parameters;
  StepArena arena;
  StateStream stream;
  kernels::Array<kernels::AdamStep> constants;
  std::vector<device::Buffer<float>> gradients;
  checkpoint::Registry registry;
};

}  // namespace

TEST_CASE("state in host memory: the bits of the update are those of resident state") {
  testing::for_each_backend([](const kernels::Execution& execution) {
    for (const StorageType storage : {StorageType::fp32, StorageType::bf16, StorageType::eight_bit})
      // Less than a row of the widest matrix, some rows, everything.
      for (const std::int64_t block_bytes : {1, 10'000, 1 << 24}) {
        CAPTURE(block_bytes);
        Matrices resident(storage, execution, Moments::held, block_bytes),
            streamed(storage, execution, Moments::on_host, block_bytes);
        const auto before = testing::bits_of(streamed.registry);
        device::Graph graph;
        for (std::uint64_t step = 1; step <= 4; ++step) {
          for (Matrices* each : {&resident, &streamed}) each->set(step, step == 2);
          resident.update();
          if (step < 3 || !device::Graph::possible(execution)) {
            streamed.update();
          } else {
            if (!graph.captured()) graph.capture(execution, [&] { streamed.update(); });
            graph.replay(execution);
          }
          CHECK(testing::different_tensors(resident.registry, streamed.registry).empty());
        }
        CHECK(testing::bits_of(streamed.registry) != before);
      }
  });
}

TEST_CASE("buffers hold at least one row of every matrix, and no more than the largest one") {
  const std::vector<ParameterSpec> specs = matrices();
  for (const auto& [most, rows] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1 << 24, 37}}) {
    StepArena arena(kernels::Backend::portable);
    const StateStream::Buffers buffers(specs, StorageType::fp32, arena, most);
    const std::int64_t state = buffers.blocks[0].size - 5 * 256;  // arrays begin at multiples of 256 bytes
    CHECK(state == rows * 304 * 8);
    CHECK(arena.device_bytes() == StateStream::kBuffers * buffers.blocks[0].size);
  }
}

}  // namespace weft::model

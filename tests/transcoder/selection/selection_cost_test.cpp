// SPDX-License-Identifier: Apache-2.0
//
// What a selection costs: bytes, exchanges, passes over the tiles, and room for entries.
#include "tests/transcoder/selection/harness.hpp"

namespace weft::transcoder {

TEST_CASE("relu and jumprelu with bounded room: enough room changes nothing, too little is reported with counts") {
  const Problem dense = Problem(37, 3, 200).fill([](auto n, auto s, auto f) { return noise(50, n, s, f); });
  for (const Activation activation : {Activation::relu, Activation::jumprelu}) {
    const Problem problem = activation == Activation::jumprelu ? with_bounds(dense) : dense;
    ModelSettings settings = settings_of(activation, Scope::layer, 1, 200);
    const auto expected = full_sort(problem, settings);
    const auto mean = static_cast<std::int64_t>(expected.size()) / (37 * 3);
    for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
      ModelSettings bounded = settings;
      bounded.capacity = 190;  // every rank's part: more than half of its features, of which half are positive
      Harness enough(execution, problem, bounded, grid);
      CHECK(enough.run().sizes().capacity < 37 * 3 * 200);
      CHECK(enough.holds(expected));

      bounded.capacity = mean / 4;
      Harness little(execution, problem, bounded, grid);
      const device::Buffer<std::int32_t> fault(1);
      device::zero(execution, fault.data(), fault.bytes());
      little.selector().report_faults_to(fault.data());
      little.run();
      CHECK(Harness::to_host(fault.data(), 1).at(0) == 1);
      CHECK(little.selector().first_fault().find(
                fmt::format("the list holds {}", little.selector().sizes().capacity)) != std::string::npos);
    });
  }
}

TEST_CASE("the thresholds settle: other data of the same distribution take one pass") {
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::layer, 4, 700);
  Problem problem(128, 2, 700);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    Harness harness(execution, problem, settings, grid);
    for (std::uint64_t step = 0; step < 6; ++step) {
      problem.fill([&](auto n, auto s, auto f) { return noise(30 + step, n, s, f) + noise(60 + step, n, s, f); });
      harness.run();
      CHECK(harness.holds(full_sort(problem, settings)));
      if (step > (on_host(execution) ? 0 : 1)) CHECK(harness.selector().statistics().passes == 1);
    }
  });
}

TEST_CASE("a threshold that is too high on one rank costs a pass; ties of the result are counted") {
  const Problem problem = Problem(8, 2, 60).fill([](auto, auto, auto) { return 1.0f; });
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::layer, 3, 60);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    Harness harness(execution, problem, settings, grid);
    Selector& selector = harness.selector();
    harness.set_thresholds(
        [&](std::size_t g) { return grid.world().rank() == 0 && g == 1 ? kernels::float_bits(2.0f) : 0u; });
    harness.run();
    CHECK(selector.statistics().redos == (on_host(execution) ? 1 : 0));
    CHECK(selector.statistics().ties_cut == 2 * (8 * 60 - 8 * 3));
    CHECK(selector.statistics().threshold == std::vector<float>{1.0f, 1.0f});
    CHECK(harness.holds(full_sort(problem, settings)));
  });
}

TEST_CASE("a selector allocates the bytes that its arena measures, and the transpose has its entries") {
  const Problem problem = Problem(50, 3, 200).fill([](auto n, auto s, auto f) { return noise(40, n, s, f); });
  for (const Activation activation : {Activation::batch_topk, Activation::topk, Activation::relu}) {
    const ModelSettings settings = settings_of(activation, Scope::all_layers, 5, 200);
    for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
      const SelectionSpec spec{.settings = settings,
                               .n_layers = 3,
                               .n_features = 200,
                               .max_tokens = 50,
                               .grid = grid.shape(),
                               .precision = Precision::bf16,
                               .backend = execution.backend};
      model::StepArena measured(execution.backend);
      const SelectionBuffers planned(spec, measured);
      const device::MemoryUse before = device::memory_use();
      model::StepArena arena(execution, grid);
      const auto selector = selector_for(spec, grid, execution, arena);
      const device::MemoryUse after = device::memory_use();
      if (on_host(execution) || grid.world().size() == 1) {  // between GPUs the communicators allocate too
        CHECK(after.device_bytes - before.device_bytes == measured.device_bytes());
        CHECK(after.host_bytes - before.host_bytes == measured.host_bytes());
      }

      Harness harness(execution, problem, settings, grid);
      Selector& filled = harness.run();
      filled.transpose();
      const kernels::SparseActivations& a = filled.activations();
      const std::int64_t n = filled.statistics().entries, n_keys = a.n_layers * a.n_features;
      const auto offsets = Harness::to_host(filled.hits().offsets.data, n_keys + 1);
      const auto position = Harness::to_host(filled.hits().position.data, n);
      const auto keys = Harness::to_host(a.key.data, n);
      CHECK(offsets.back() == n);
      for (std::int64_t k = 0; k < n_keys; ++k)
        for (auto i = offsets[static_cast<std::size_t>(k)]; i < offsets[static_cast<std::size_t>(k + 1)]; ++i)
          REQUIRE(keys[position[static_cast<std::size_t>(i)]] == k);
    });
  }
}

}  // namespace weft::transcoder

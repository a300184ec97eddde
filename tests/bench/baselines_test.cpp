// SPDX-License-Identifier: Apache-2.0
//
// The baselines of weft benchmark have the results of training bit for bit, on every grid.
#include "bench/transcoder/baselines.hpp"

#include "bench/transcoder/selection_on_rank_0.hpp"
#include "device/memory.hpp"
#include "tests/transcoder/selection/harness.hpp"
#include "tests/transcoder/trainer_run.hpp"

namespace weft::transcoder {
namespace {

/// What a case sets; the rest is that of training.
struct Sets {
  bench::SelectionPlace selection = bench::SelectionPlace::everywhere;
  bool wait = false, together = true, keep_buffers = true, direct = true;
};

Configuration with(const Sets& sets, const Configuration& configuration = {}) {
  bench::TranscoderSettings settings;
  settings.selection = sets.selection;
  settings.wait = sets.wait;
  settings.together = sets.together;
  settings.keep_buffers = sets.keep_buffers;
  settings.direct = sets.direct;
  return bench::with_baselines(configuration, settings);
}

}  // namespace

TEST_CASE("steps with each baseline are those of training, in every tensor") {
  const Data data;
  Configuration with_dead = with_dead_features();
  with_dead.transcoder.k_initial = 0;  // selection on rank 0 has a constant k
  for (const Configuration& configuration :
       {configuration_for(Scope::layer), configuration_for(Scope::all_layers), with_dead})
    for (const parallel::GridShape& shape : grids()) {
      CAPTURE(shape.text());
      const auto trained = [&](const Configuration& c) {
        Run run(c, data, shape);
        for (std::int64_t i = 0; i < 3; ++i) run.step(data, i);
        run.trainer.wait();
        return std::pair(run.losses, run.parameters());
      };
      const auto expected = trained(configuration);
      for (const Sets& sets : {Sets{.selection = bench::SelectionPlace::rank_0}, Sets{.wait = true},
                               Sets{.together = false}, Sets{.keep_buffers = false}, Sets{.direct = false},
                               Sets{bench::SelectionPlace::rank_0, true, false, false, false}})
        CHECK(trained(with(sets, configuration)) == expected);
    }
}

TEST_CASE("with the selection on rank 0, the plan is that of rank 0") {
  const Data data;
  const Configuration configuration =
      with({.selection = bench::SelectionPlace::rank_0}, configuration_for(Scope::layer));
  for (const parallel::GridShape& shape : grids()) {
    const Shape sizes = shape_of(configuration.transcoder, kLayers, kWidth);
    const model::StepArena planned =
        measure_step(configuration, sizes, shape, kLayers * kWidth * 4, testing::execution().backend);
    const device::MemoryUse before = device::memory_use();
    const Run run(configuration, data, shape);
    const std::int64_t state = run.trainer.model().parameters().bytes().total() + 8 * 4 * kLayers * kWidth,
                       taken = device::memory_use().device_bytes - before.device_bytes - state;
    if (testing::world().rank() == 0)
      CHECK(taken == planned.device_bytes());
    else
      CHECK(taken <= planned.device_bytes());
  }
}

TEST_CASE("selection on rank 0, and exchange histogram by histogram, have the same result") {
  const auto all = cases();
  const Configuration on_rank_0 = with({.selection = bench::SelectionPlace::rank_0, .keep_buffers = false}),
                      one_by_one = with({.together = false});
  for (const Configuration& baseline : {on_rank_0, one_by_one})
    for (const Scope scope : {Scope::layer, Scope::all_layers})
      for (const Case& c : all) {
        const ModelSettings settings = settings_of(Activation::batch_topk, scope, 5.3, c.problem.n_features);
        const auto expected = full_sort(c.problem, settings);
        for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
          INFO(c.name, ", scope ", scope == Scope::layer ? "layer" : "all_layers");
          Harness harness(
              execution, c.problem, settings, grid,
              {.max_tokens = 50, .factory = baseline.alternatives.selector, .exchange = baseline.parallel.exchange});
          for (int repeat = 0; repeat < 2; ++repeat) {
            harness.run();
            CHECK(harness.holds(expected));
          }
        });
      }
  for (const auto& [n, f] : {std::pair<std::int64_t, std::int64_t>{1, 50}, {3, 1}, {1, 1}, {40, 3}}) {
    const Problem problem = Problem(n, 2, f).fill([](auto t, auto s, auto i) { return noise(20, t, s, i); });
    const ModelSettings settings = settings_of(Activation::batch_topk, Scope::all_layers, 1.5, f);
    const auto expected = full_sort(problem, settings);
    for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
      Harness harness(
          execution, problem, settings, grid,
          {.max_tokens = 100, .factory = on_rank_0.alternatives.selector, .exchange = on_rank_0.parallel.exchange});
      harness.run();
      CHECK(harness.holds(expected));
    });
  }
}

TEST_CASE("selection on rank 0 allocates the bytes that its arena measures there, and fewer on other ranks") {
  const bench::SelectionOnRankZero rank_0;
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::all_layers, 5, 200);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    const SelectionSpec spec{.settings = settings,
                             .n_layers = 3,
                             .n_features = 200,
                             .max_tokens = 50,
                             .grid = grid.shape(),
                             .precision = Precision::bf16,
                             .backend = execution.backend,
                             .factory = &rank_0};
    model::StepArena measured(execution.backend);
    const SelectionBuffers planned(spec, measured);
    const device::MemoryUse before = device::memory_use();
    model::StepArena arena(execution, grid);
    const auto selector = selector_for(spec, grid, execution, arena);
    const device::MemoryUse after = device::memory_use();
    const std::int64_t device = after.device_bytes - before.device_bytes, host = after.host_bytes - before.host_bytes;
    // Between GPUs the communicator allocates too, as their connection requires.
    if (kernels::kCudaBuild && grid.world().size() > 1) return;
    if (grid.world().rank() == 0) {
      CHECK(device == measured.device_bytes());
      CHECK(host == measured.host_bytes());
    } else {
      CHECK(device < measured.device_bytes());
    }
  });
}

TEST_CASE("a selector follows one on rank 0") {
  const bench::SelectionOnRankZero rank_0;
  for (const Case& c : cases()) {
    // Only these features may be selected, of one layer none.
    Problem few = c.problem;
    for (std::int64_t s = 0; s < few.n_layers; ++s)
      for (std::int64_t f = 0; f < few.n_features; ++f)
        if (s == 1 || f % 3 == s)
          few.bias[static_cast<std::size_t>(s * few.n_features + f)] = -std::numeric_limits<float>::infinity();
    for (const double k : {4.0, 90.0}) {
      const ModelSettings lead = settings_of(Activation::batch_topk, Scope::all_layers, 3, few.n_features),
                          settings = settings_of(Activation::topk, Scope::layer, k, few.n_features);
      const auto expected = full_sort(few, settings), expected_of_lead = full_sort(c.problem, lead);
      for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
        INFO(c.name, ", k = ", k);
        Harness leader(execution, c.problem, lead, grid, {.factory = &rank_0}),
            follower(execution, few, settings, grid, {.follows = true});
        for (int repeat = 0; repeat < 3; ++repeat) {  // at first the leader computes its tiles several times
          follower.follow();
          leader.run(&follower.selector());
          follower.selector().finish();
          CHECK(leader.holds(expected_of_lead));
          CHECK(follower.holds(expected));
        }
      });
    }
  }
}

}  // namespace weft::transcoder

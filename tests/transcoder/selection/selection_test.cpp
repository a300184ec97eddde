// SPDX-License-Identifier: Apache-2.0
//
// The selected set against a full sort, bit for bit. Each case runs with every driver of the build (host; in a CUDA
// build also device) on every grid that the ranks allow.
#include "tests/transcoder/selection/harness.hpp"

namespace weft::transcoder {

TEST_CASE("batch selection equals a full sort on every grid, for any thresholds of the filter") {
  const auto all = cases();
  for (const Scope scope : {Scope::layer, Scope::all_layers})
    for (const double k : {0.7, 16.0 + 2.0 / 3})
      for (const Case& c : all) {
        const ModelSettings settings = settings_of(Activation::batch_topk, scope, k, c.problem.n_features);
        const auto expected = full_sort(c.problem, settings);
        for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
          INFO(c.name, ", k = ", k, ", scope ", scope == Scope::layer ? "layer" : "all_layers");
          Harness harness(execution, c.problem, settings, grid);
          harness.run();
          CHECK(harness.holds(expected));
          harness.run();  // with the thresholds that the first batch left
          CHECK(harness.holds(expected));
          CHECK(harness.selector().statistics().redos == 0);
          const auto repeat = [&](auto&& key_of_group) {
            harness.set_thresholds(key_of_group);
            harness.run();
            CHECK(harness.holds(expected));
          };
          repeat([](std::size_t) { return 0x7f800000u; });
          repeat([](std::size_t) { return 0xffffffffu; });
          for (std::uint64_t seed = 0; seed < 3; ++seed)  // different thresholds on every rank
            repeat([&](std::size_t g) {
              const auto random = philox(seed, Purpose::test, static_cast<std::uint64_t>(grid.world().rank()), g);
              return kernels::float_bits(kernels::uniform_float(random.word[0]) *
                                         (random.word[1] % 2 == 0 ? 1.0f : 6.0f));
            });
        });
      }
}

TEST_CASE("per-token selection and relu equal a full sort on every grid") {
  const auto all = cases();
  struct Variant {
    Activation activation;
    Scope scope;
    double k;
  };
  for (const Variant v : {Variant{Activation::topk, Scope::layer, 16},
                          {Activation::topk, Scope::all_layers, 2.5},
                          {Activation::topk, Scope::layer, 1},
                          {Activation::topk, Scope::all_layers, 150},
                          {Activation::topk, Scope::layer, 500},
                          {Activation::relu, Scope::layer, 0}})
    for (const Case& c : all) {
      const ModelSettings settings = settings_of(v.activation, v.scope, v.k, c.problem.n_features);
      const auto expected = full_sort(c.problem, settings);
      for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
        INFO(c.name, ", k = ", v.k, ", activation ", static_cast<int>(v.activation));
        Harness harness(execution, c.problem, settings, grid);
        for (int repeat = 0; repeat < 2; ++repeat) {
          harness.run();
          CHECK(harness.holds(expected));
        }
      });
    }
}

TEST_CASE("jumprelu keeps every entry above the cut of its feature, and none that equals it") {
  const ModelSettings settings = settings_of(Activation::jumprelu, Scope::layer, 1, 201);
  for (const Case& c : cases()) {
    const Problem problem = with_bounds(c.problem);
    const auto expected = full_sort(problem, settings);
    for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
      INFO(c.name);
      Harness harness(execution, problem, settings, grid);
      for (int repeat = 0; repeat < 2; ++repeat) {
        harness.run();
        CHECK(harness.holds(expected));
      }
    });
  }
}

TEST_CASE("more ranks than features or tokens, and batches shorter than the largest") {
  for (const Activation activation : {Activation::batch_topk, Activation::topk, Activation::relu})
    for (const auto& [n, f] : {std::pair<std::int64_t, std::int64_t>{1, 50}, {3, 1}, {1, 1}, {40, 3}}) {
      const Problem problem = Problem(n, 2, f).fill([](auto t, auto s, auto i) { return noise(20, t, s, i); });
      const ModelSettings settings = settings_of(activation, Scope::all_layers, 1.5, f);
      const auto expected = full_sort(problem, settings);
      for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
        Harness harness(execution, problem, settings, grid, {.max_tokens = 100});
        harness.run();
        CHECK(harness.holds(expected));
        harness.run();
        CHECK(harness.holds(expected));
      });
    }
}

TEST_CASE("a selector that follows another one selects from its tiles, however often they are computed") {
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
        Harness leader(execution, c.problem, lead, grid), follower(execution, few, settings, grid, {.follows = true});
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

TEST_CASE("tiles of the real size") {
  // 1030 x 2100: two blocks of tokens and, on one rank, two of features.
  const Problem problem = Problem(1030, 1, 2100).fill([](auto n, auto s, auto f) { return noise(21, n, s, f); });
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::layer, 8, 2100);
  const auto expected = full_sort(problem, settings);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    Harness harness(execution, problem, settings, grid, {.tile_bytes = std::int64_t{8} << 20});
    harness.run();
    CHECK(harness.holds(expected));
    CHECK(harness.selector().statistics().passes > 1);  // the threshold is not known yet
    for (int repeat = 0; repeat < 4; ++repeat) {
      harness.run();
      CHECK(harness.holds(expected));
    }
    CHECK(harness.selector().statistics().passes == 1);
    CHECK(harness.selector().statistics().threshold.at(0) > 0);
  });
}

TEST_CASE("bf16 products: the key is the stored product plus the bias in fp32") {
  const std::int64_t n_tokens = 30, n_features = 170;
  Problem problem(n_tokens, 2, n_features);
  problem.fill([](auto n, auto s, auto f) { return static_cast<float>(kernels::to_bf16(noise(50, n, s, f))); });
  for (std::size_t i = 0; i < problem.bias.size(); ++i) problem.bias[i] = static_cast<float>(i % 7) * 0.001f;
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::all_layers, 4, n_features);
  const auto expected = full_sort(problem, settings);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    const parallel::Range features = grid.part(parallel::kFeatureAxis, n_features),
                          tokens = grid.part(parallel::kDataAxis, n_tokens);
    model::StepArena arena(execution, grid);
    const auto selector = selector_for({.settings = settings,
                                        .n_layers = 2,
                                        .n_features = n_features,
                                        .max_tokens = n_tokens,
                                        .grid = grid.shape(),
                                        .precision = Precision::bf16,
                                        .backend = execution.backend,
                                        .tile_bytes = 8192},
                                       grid, execution, arena);
    device::Buffer<float> bias(2 * n_features);
    device::copy(execution, bias.data(), problem.bias.data(), bias.bytes(), device::Direction::to_device);
    const std::vector<kernels::Array<const float>> of_layer{
        {bias.data() + features.begin, features.size()}, {bias.data() + n_features + features.begin, features.size()}};
    selector->select(n_tokens, of_layer,
                     [&](const kernels::Execution& where, const kernels::TileRange& tile, kernels::AnyMatrix product) {
                       REQUIRE(product.type == kernels::Scalar::bf16);
                       for (std::int64_t i = 0; i < tile.token_count; ++i) {
                         std::vector<kernels::bf16> row;
                         for (std::int64_t j = 0; j < tile.feature_count; ++j)
                           row.push_back(kernels::to_bf16(problem.at(tokens.begin + tile.token_begin + i, tile.layer,
                                                                     features.begin + tile.feature_begin + j)));
                         device::copy(where, static_cast<kernels::bf16*>(product.data) + i * product.stride, row.data(),
                                      tile.feature_count * 2, device::Direction::to_device);
                         kernels::fence(where);
                       }
                     });
    std::int64_t total = selector->statistics().entries;
    grid.world().sum({&total, 1});
    CHECK(total == static_cast<std::int64_t>(expected.size()));
    const auto values = Harness::to_host(selector->activations().value.data, selector->statistics().entries);
    std::size_t i = 0;
    for (const Entry& e : expected)
      if (e.token >= tokens.begin && e.token < tokens.end && e.feature >= features.begin && e.feature < features.end)
        REQUIRE(kernels::float_bits(values.at(i++)) == kernels::float_bits(e.value));
    CHECK(i == values.size());
  });
}

}  // namespace weft::transcoder

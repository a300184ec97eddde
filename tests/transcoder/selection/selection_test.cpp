// SPDX-License-Identifier: Apache-2.0
//
// The selected set against a full sort on one process, bit for bit, for given pre-activations: the producer copies from
// an array, so that the dense library is not involved. Each case runs with every driver of the build (host; in a CUDA
// build also device) on every grid that the ranks allow.
#include "transcoder/selection/selection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/random.hpp"
#include "kernels/runtime.hpp"
#include "tests/test.hpp"

namespace weft::transcoder {
namespace {

using kernels::philox;
using kernels::Purpose;

/// Products and biases of a whole batch, on every rank.
struct Problem {
  std::int64_t n_tokens, n_layers, n_features;
  std::vector<float> product;  // [tokens, layers, features]
  std::vector<float> bias;     // [layers, features]
  std::vector<float> cut;      // the same: of jumprelu; else empty

  Problem(std::int64_t n, std::int64_t l, std::int64_t f)
      : n_tokens(n),
        n_layers(l),
        n_features(f),
        product(static_cast<std::size_t>(n * l * f)),
        bias(static_cast<std::size_t>(l * f)) {}
  float& at(std::int64_t n, std::int64_t s, std::int64_t f) {
    return product[static_cast<std::size_t>((n * n_layers + s) * n_features + f)];
  }
  float at(std::int64_t n, std::int64_t s, std::int64_t f) const {
    return product[static_cast<std::size_t>((n * n_layers + s) * n_features + f)];
  }
  float result(std::int64_t n, std::int64_t s, std::int64_t f) const {
    return at(n, s, f) + bias[static_cast<std::size_t>(s * n_features + f)];
  }

  template <class Value>
  Problem& fill(Value&& value) {
    for (std::int64_t n = 0; n < n_tokens; ++n)
      for (std::int64_t s = 0; s < n_layers; ++s)
        for (std::int64_t f = 0; f < n_features; ++f) at(n, s, f) = value(n, s, f);
    return *this;
  }
};

/// A number in (-1, 1) for an entry, never the same for two seeds.
float noise(std::uint64_t seed, std::int64_t n, std::int64_t s, std::int64_t f) {
  const auto index = static_cast<std::uint64_t>((n * 64 + s) * 65536 + f);
  return 2 * kernels::uniform_float(philox(seed, Purpose::test, 0, index).word[0]) - 1;
}

struct Case {
  std::string name;
  Problem problem;
};

std::vector<Case> cases() {
  constexpr std::int64_t kN = 37, kL = 3, kF = 201;  // nothing divides by 2, 3 or 4
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  std::vector<Case> all;
  const auto add = [&](const char* name, auto&& value) { all.push_back({name, Problem(kN, kL, kF).fill(value)}); };
  add("random", [](auto n, auto s, auto f) { return noise(1, n, s, f); });
  // 16 levels: ties at every threshold, across tokens, layers, features and ranks.
  add("ties", [](auto n, auto s, auto f) { return std::floor(noise(2, n, s, f) * 16) / 16; });
  add("few ties", [](auto n, auto s, auto f) { return std::floor(noise(3, n, s, f) * 4096) / 4096; });
  add("all equal", [](auto, auto, auto) { return 0.75f; });
  add("all equal but one layer", [](auto n, auto s, auto f) { return s == 1 ? noise(4, n, s, f) : 0.75f; });
  add("all negative", [](auto n, auto s, auto f) { return -1 - noise(5, n, s, f); });
  add("all zero", [](auto n, auto, auto) { return n % 2 == 0 ? 0.0f : -0.0f; });
  add("few positive", [](auto n, auto s, auto f) { return noise(6, n, s, f) - 0.996f; });
  add("one token", [](auto n, auto s, auto f) { return n == 23 ? 5 + noise(7, n, s, f) : noise(7, n, s, f) * 0.5f; });
  add("one token, ties", [](auto n, auto, auto f) { return n == 23 ? 5.0f : static_cast<float>(f % 3); });
  add("one feature",
      [](auto n, auto s, auto f) { return f == 200 ? 5 + noise(8, n, s, f) : noise(8, n, s, f) * 0.5f; });
  add("one rank", [](auto n, auto s, auto f) { return n < 9 && f < 50 ? 5 + noise(9, n, s, f) : noise(9, n, s, f); });
  add("one rank, ties", [](auto n, auto, auto f) { return n > 27 && f > 150 ? 5.0f : 1.0f; });
  add("one layer", [](auto n, auto s, auto f) { return s == 2 ? 3 + noise(10, n, s, f) : noise(10, n, s, f); });
  add("not finite", [=](auto n, auto s, auto f) {
    const float z = noise(11, n, s, f);
    return z > 0.99f ? infinity : z > 0.9f ? nan : z < -0.9f ? -infinity : z;
  });
  add("tiny", [](auto n, auto s, auto f) { return noise(12, n, s, f) * 1e-41f; });  // denormal: keys below 2^23
  add("wide range",
      [](auto n, auto s, auto f) { return std::ldexp(noise(13, n, s, f), static_cast<int>(f % 200) - 100); });
  all.push_back({"bias", Problem(kN, kL, kF).fill([](auto n, auto s, auto f) {
                   return std::floor(noise(14, n, s, f) * 32) / 32;
                 })});
  for (std::size_t i = 0; i < all.back().problem.bias.size(); ++i)
    all.back().problem.bias[i] = static_cast<float>(i % 5) * 0.25f - 0.5f;
  return all;
}

struct Entry {
  float value;
  std::int64_t token, layer, feature;
};

/// Sorts every positive entry of every group and keeps the first of each.
std::vector<Entry> full_sort(const Problem& problem, const ModelSettings& settings) {
  const bool per_token = settings.activation == Activation::topk, per_layer = settings.scope == Scope::layer;
  const auto budget = static_cast<std::size_t>(std::max<std::int64_t>(
      1, std::llround(settings.k *
                      static_cast<double>((per_token ? 1 : problem.n_tokens) * (per_layer ? 1 : problem.n_layers)))));
  const std::int64_t n_groups = (per_token ? problem.n_tokens : 1) * (per_layer ? problem.n_layers : 1);
  std::vector<std::vector<Entry>> groups(static_cast<std::size_t>(n_groups));
  for (std::int64_t n = 0; n < problem.n_tokens; ++n)
    for (std::int64_t s = 0; s < problem.n_layers; ++s)
      for (std::int64_t f = 0; f < problem.n_features; ++f) {
        const float r = problem.result(n, s, f);
        const std::int64_t group = (per_token ? n : 0) * (per_layer ? problem.n_layers : 1) + (per_layer ? s : 0);
        const float cut = problem.cut.empty() ? 0 : problem.cut[static_cast<std::size_t>(s * problem.n_features + f)];
        if (r > cut) groups[static_cast<std::size_t>(group)].push_back({r, n, s, f});
      }
  std::vector<Entry> kept;
  for (auto& group : groups) {
    std::sort(group.begin(), group.end(), [](const Entry& a, const Entry& b) {
      if (a.value != b.value) return a.value > b.value;
      return std::tie(a.token, a.layer, a.feature) < std::tie(b.token, b.layer, b.feature);
    });
    if (kernels::activation_keeps_k(settings.activation)) group.resize(std::min(group.size(), budget));
    kept.insert(kept.end(), group.begin(), group.end());
  }
  std::sort(kept.begin(), kept.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.token, a.layer, a.feature) < std::tie(b.token, b.layer, b.feature);
  });
  return kept;
}

/// The selector of one rank, fed from a problem.
class Harness {
 public:
  struct Options {
    std::int64_t max_tokens = 0;  ///< 0: those of the problem
    std::int64_t tile_bytes = 8192;
    ExchangeSettings exchange = {};
    bool follows = false;
  };

  Harness(const kernels::Execution& execution, const Problem& problem, const ModelSettings& settings,
          const parallel::Grid& grid, const Options& options)
      : execution_(execution),
        problem_(problem),
        grid_(grid),
        selector_(make_selector(settings,
                                {problem.n_layers, problem.n_features, std::max(options.max_tokens, problem.n_tokens),
                                 options.tile_bytes, options.exchange, options.follows},
                                grid, execution, Precision::fp32)),
        features_(grid.part(parallel::kFeatureAxis, problem.n_features)),
        tokens_(grid.part(parallel::kDataAxis, problem.n_tokens)) {
    for (std::int64_t s = 0; s < problem.n_layers; ++s) {
      bias_.emplace_back(features_.size());
      device::copy(execution, bias_.back().data(), problem.bias.data() + s * problem.n_features + features_.begin,
                   features_.size() * 4, device::Direction::to_device);
      if (problem.cut.empty()) continue;
      cut_.emplace_back(features_.size());
      device::copy(execution, cut_.back().data(), problem.cut.data() + s * problem.n_features + features_.begin,
                   features_.size() * 4, device::Direction::to_device);
    }
  }
  Harness(const kernels::Execution& execution, const Problem& problem, const ModelSettings& settings,
          const parallel::Grid& grid)
      : Harness(execution, problem, settings, grid, Options{}) {}

  /// With Options::follows: before another harness runs with this one's selector, which then finishes.
  void follow() {
    followed_bias_.clear();
    for (const auto& b : bias_) followed_bias_.push_back(b.array());
    selector_->follow(problem_.n_tokens, followed_bias_);
  }

  Selector& run(Selector* follower = nullptr) {
    std::vector<kernels::Array<const float>> bias, cut;
    for (const auto& b : bias_) bias.push_back(b.array());
    for (const auto& c : cut_) cut.push_back(c.array());
    selector_->select(
        problem_.n_tokens, bias,
        [&](const kernels::Execution& where, const TileRequest& tile, kernels::AnyMatrix product) {
          for (std::int64_t i = 0; i < tile.token_count; ++i)
            device::copy(
                where, static_cast<float*>(product.data) + i * product.stride,
                &problem_.product[static_cast<std::size_t>(
                    ((tokens_.begin + tile.token_begin + i) * problem_.n_layers + tile.layer) * problem_.n_features +
                    features_.begin + tile.feature_begin)],
                tile.feature_count * 4, device::Direction::to_device);
          if (follower != nullptr) follower->take(where, tile, product);
        },
        cut);
    return *selector_;
  }

  Selector& selector() { return *selector_; }

  /// Replaces the filter's thresholds of the next batch on this rank.
  template <class Key>
  void set_thresholds(Key&& key_of_group) {
    const Selector::ControllerState state = selector_->controller_state();
    std::vector<std::uint32_t> keys;
    for (std::int64_t g = 0; g < state.keys.size; ++g) keys.push_back(key_of_group(static_cast<std::size_t>(g)));
    if (!state.on_device) {
      std::copy(keys.begin(), keys.end(), state.keys.data);
      return;
    }
    device::copy(execution_, state.keys.data, keys.data(), state.keys.size * 4, device::Direction::to_device);
    kernels::fence(execution_);
  }

  /// True if the CSR holds exactly this rank's part of `expected`, in order.
  bool holds(const std::vector<Entry>& expected) {
    const kernels::SparseActivations& a = selector_->activations();
    if (a.n_tokens != tokens_.size() || a.n_layers != problem_.n_layers || a.n_features != features_.size())
      return false;
    std::vector<Entry> own;
    for (const Entry& e : expected)
      if (e.token >= tokens_.begin && e.token < tokens_.end && e.feature >= features_.begin &&
          e.feature < features_.end)
        own.push_back(e);
    if (selector_->statistics().entries != static_cast<std::int64_t>(own.size()) ||
        a.key.size < static_cast<std::int64_t>(own.size()))
      return false;
    const auto offsets = to_host(a.row_offsets.data, tokens_.size() + 1);
    const auto keys = to_host(a.key.data, static_cast<std::int64_t>(own.size()));
    const auto values = to_host(a.value.data, static_cast<std::int64_t>(own.size()));
    if (offsets.front() != 0 || offsets.back() != static_cast<std::int64_t>(own.size())) return false;
    std::size_t i = 0;
    for (std::int64_t n = 0; n < tokens_.size(); ++n) {
      if (offsets[static_cast<std::size_t>(n)] != static_cast<std::int64_t>(i)) return false;
      for (; i < own.size() && own[i].token - tokens_.begin == n; ++i)
        if (keys[i] != own[i].layer * features_.size() + own[i].feature - features_.begin ||
            kernels::float_bits(values[i]) != kernels::float_bits(own[i].value))
          return false;
    }
    return i == own.size();
  }

  template <class T>
  static std::vector<T> to_host(const T* data, std::int64_t n) {
    std::vector<T> host(static_cast<std::size_t>(n));
    device::copy(testing::execution(), host.data(), data, n * static_cast<std::int64_t>(sizeof(T)),
                 device::Direction::to_host);
    kernels::fence(testing::execution());
    return host;
  }

 private:
  kernels::Execution execution_;
  const Problem& problem_;
  const parallel::Grid& grid_;
  std::unique_ptr<Selector> selector_;
  parallel::Range features_, tokens_;
  std::vector<device::Buffer<float>> bias_, cut_;
  std::vector<kernels::Array<const float>> followed_bias_;
};  // namespace

bool on_host(const kernels::Execution& execution) { return execution.backend == kernels::Backend::portable; }

/// function(execution, grid) for every driver of the build and every grid of the ranks.
template <class Function>
void for_each_driver_and_grid(Function&& function) {
  const parallel::World& world = testing::world();
  for (const kernels::Backend backend : {kernels::Backend::portable, kernels::Backend::cuda}) {
    if (backend == kernels::Backend::cuda && !kernels::kCudaBuild) continue;
    kernels::Execution execution = testing::execution();
    execution.backend = backend;
    for (std::int64_t data = 1; data <= world.size(); ++data) {
      if (world.size() % data != 0) continue;
      const parallel::Grid grid(world, parallel::grid_shape(data, {"feature", 0}, world.size()));
      INFO((on_host(execution) ? "host" : "device"), " driver, grid ", data, " x ", world.size() / data);
      function(static_cast<const kernels::Execution&>(execution), grid);
    }
  }
}

ModelSettings settings_of(Activation activation, Scope scope, double k, std::int64_t n_features) {
  ModelSettings settings;
  settings.features = n_features;
  settings.activation = activation;
  settings.scope = scope;
  settings.k = k;
  return settings;
}

}  // namespace

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

TEST_CASE("selection on rank 0, and exchange histogram by histogram, have the same result") {
  const auto all = cases();
  ExchangeSettings on_rank_0, one_by_one;
  on_rank_0.selection = SelectionPlace::rank_0;
  on_rank_0.strategy.keep_buffers = false;
  one_by_one.together = false;
  for (const ExchangeSettings& exchange : {on_rank_0, one_by_one})
    for (const Scope scope : {Scope::layer, Scope::all_layers})
      for (const Case& c : all) {
        const ModelSettings settings = settings_of(Activation::batch_topk, scope, 5.3, c.problem.n_features);
        const auto expected = full_sort(c.problem, settings);
        for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
          INFO(c.name, ", scope ", scope == Scope::layer ? "layer" : "all_layers");
          Harness harness(execution, c.problem, settings, grid, {.max_tokens = 50, .exchange = exchange});
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
      Harness harness(execution, problem, settings, grid, {.max_tokens = 100, .exchange = on_rank_0});
      harness.run();
      CHECK(harness.holds(expected));
    });
  }
}

TEST_CASE("selection on rank 0 allocates the bytes of its sizes there, and fewer on other ranks") {
  ExchangeSettings exchange;
  exchange.selection = SelectionPlace::rank_0;
  const ModelSettings settings = settings_of(Activation::batch_topk, Scope::all_layers, 5, 200);
  for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
    const device::MemoryUse before = device::memory_use();
    const auto selector = make_selector(settings, {3, 200, 50, 0, exchange}, grid, execution, Precision::bf16);
    const device::MemoryUse after = device::memory_use();
    const SelectionSizes& sizes = selector->sizes();
    const std::int64_t device = after.device_bytes - before.device_bytes, host = after.host_bytes - before.host_bytes;
    CHECK((sizes.rank_0_device_bytes > 0) == (grid.world().size() > 1));
    // Between GPUs the communicator allocates too, as their connection requires.
    if (kernels::kCudaBuild && grid.world().size() > 1) return;
    if (grid.world().rank() == 0) {
      CHECK(device == sizes.device_bytes + sizes.rank_0_device_bytes);
      CHECK(host == sizes.host_bytes + sizes.rank_0_host_bytes);
    } else {
      CHECK(device < sizes.device_bytes + sizes.rank_0_device_bytes);
    }
  });
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

/// Different for neighbouring features; some no entry exceeds, some all positive ones do, or also 0 and some negative
/// ones.
Problem with_cuts(Problem problem) {
  for (std::int64_t s = 0; s < problem.n_layers; ++s)
    for (std::int64_t f = 0; f < problem.n_features; ++f)
      problem.cut.push_back(f % 11 == 0  ? -0.5f
                            : f % 5 == 0 ? 0.0f
                            : f % 7 == 0 ? std::numeric_limits<float>::infinity()
                                         : 0.25f * static_cast<float>(f % 4));
  return problem;
}

TEST_CASE("jumprelu keeps every entry above the cut of its feature, and none that equals it") {
  const ModelSettings settings = settings_of(Activation::jumprelu, Scope::layer, 1, 201);
  for (const Case& c : cases()) {
    const Problem problem = with_cuts(c.problem);
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

TEST_CASE("relu and jumprelu with bounded room: enough room changes nothing, too little is reported with counts") {
  const Problem dense = Problem(37, 3, 200).fill([](auto n, auto s, auto f) { return noise(50, n, s, f); });
  for (const Activation activation : {Activation::relu, Activation::jumprelu}) {
    const Problem problem = activation == Activation::jumprelu ? with_cuts(dense) : dense;
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
  ExchangeSettings everywhere, on_rank_0;
  on_rank_0.selection = SelectionPlace::rank_0;
  for (const Case& c : cases()) {
    // Only these features may be selected, of one layer none.
    Problem few = c.problem;
    for (std::int64_t s = 0; s < few.n_layers; ++s)
      for (std::int64_t f = 0; f < few.n_features; ++f)
        if (s == 1 || f % 3 == s)
          few.bias[static_cast<std::size_t>(s * few.n_features + f)] = -std::numeric_limits<float>::infinity();
    for (const ExchangeSettings& exchange : {everywhere, on_rank_0})
      for (const double k : {4.0, 90.0}) {
        const ModelSettings lead = settings_of(Activation::batch_topk, Scope::all_layers, 3, few.n_features),
                            settings = settings_of(Activation::topk, Scope::layer, k, few.n_features);
        const auto expected = full_sort(few, settings), expected_of_lead = full_sort(c.problem, lead);
        for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
          INFO(c.name, ", k = ", k);
          Harness leader(execution, c.problem, lead, grid, {.exchange = exchange}),
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

TEST_CASE("a selector allocates the bytes of its sizes, and the transpose has its entries") {
  const Problem problem = Problem(50, 3, 200).fill([](auto n, auto s, auto f) { return noise(40, n, s, f); });
  for (const Activation activation : {Activation::batch_topk, Activation::topk, Activation::relu}) {
    const ModelSettings settings = settings_of(activation, Scope::all_layers, 5, 200);
    for_each_driver_and_grid([&](const kernels::Execution& execution, const parallel::Grid& grid) {
      const device::MemoryUse before = device::memory_use();
      const auto selector = make_selector(settings, {3, 200, 50}, grid, execution, Precision::bf16);
      const device::MemoryUse after = device::memory_use();
      if (on_host(execution) || grid.world().size() == 1) {  // between GPUs the communicators allocate too
        CHECK(after.device_bytes - before.device_bytes == selector->sizes().device_bytes);
        CHECK(after.host_bytes - before.host_bytes == selector->sizes().host_bytes);
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
    const auto selector = make_selector(settings, {2, n_features, n_tokens, 8192}, grid, execution, Precision::bf16);
    device::Buffer<float> bias(2 * n_features);
    device::copy(execution, bias.data(), problem.bias.data(), bias.bytes(), device::Direction::to_device);
    const std::vector<kernels::Array<const float>> of_layer{
        {bias.data() + features.begin, features.size()}, {bias.data() + n_features + features.begin, features.size()}};
    selector->select(n_tokens, of_layer,
                     [&](const kernels::Execution& where, const TileRequest& tile, kernels::AnyMatrix product) {
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

// SPDX-License-Identifier: Apache-2.0
//
// Pre-activations of a whole batch, their selection by a full sort on one process, and the selector of one rank fed
// from them: its producer copies from an array, so that the dense library is not involved.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/random.hpp"
#include "tests/shared_grid.hpp"
#include "tests/test.hpp"
#include "transcoder/selection/drivers.hpp"

namespace weft::transcoder {

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
inline float noise(std::uint64_t seed, std::int64_t n, std::int64_t s, std::int64_t f) {
  const auto index = static_cast<std::uint64_t>((n * 64 + s) * 65536 + f);
  return 2 * kernels::uniform_float(philox(seed, Purpose::test, 0, index).word[0]) - 1;
}

struct Case {
  std::string name;
  Problem problem;
};

inline std::vector<Case> cases() {
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
inline std::vector<Entry> full_sort(const Problem& problem, const ModelSettings& settings) {
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

inline std::unique_ptr<Selector> selector_for(const SelectionSpec& spec, const parallel::Grid& grid,
                                              const kernels::Execution& execution, model::StepArena& arena) {
  return make_selector(spec, SelectionBuffers(spec, arena), grid, execution);
}

/// The selector of one rank, fed from a problem.
class Harness {
 public:
  struct Options {
    std::int64_t max_tokens = 0;  ///< 0: those of the problem
    std::int64_t tile_bytes = 8192;
    bool follows = false;
    const SelectorFactory* factory = nullptr;
    parallel::ExchangeStrategy exchange = {};
  };

  Harness(const kernels::Execution& execution, const Problem& problem, const ModelSettings& settings,
          const parallel::Grid& grid, const Options& options)
      : execution_(execution),
        problem_(problem),
        grid_(grid),
        arena_(execution, grid),
        selector_(selector_for({.settings = settings,
                                .n_layers = problem.n_layers,
                                .n_features = problem.n_features,
                                .max_tokens = std::max(options.max_tokens, problem.n_tokens),
                                .grid = grid.shape(),
                                .backend = execution.backend,
                                .tile_bytes = options.tile_bytes,
                                .exchange = options.exchange,
                                .factory = options.factory,
                                .follows = options.follows},
                               grid, execution, arena_)),
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
        [&](const kernels::Execution& where, const kernels::TileRange& tile, kernels::AnyMatrix product) {
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
  model::StepArena arena_;
  std::unique_ptr<Selector> selector_;
  parallel::Range features_, tokens_;
  std::vector<device::Buffer<float>> bias_, cut_;
  std::vector<kernels::Array<const float>> followed_bias_;
};

inline bool on_host(const kernels::Execution& execution) { return execution.backend == kernels::Backend::portable; }

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
      const auto shared = testing::shared_grid(world.all(), parallel::grid_shape(data, {"feature", 0}, world.size()));
      const parallel::Grid& grid = *shared;
      INFO((on_host(execution) ? "host" : "device"), " driver, grid ", data, " x ", world.size() / data);
      function(static_cast<const kernels::Execution&>(execution), grid);
    }
  }
}

inline ModelSettings settings_of(Activation activation, Scope scope, double k, std::int64_t n_features) {
  ModelSettings settings;
  settings.features = n_features;
  settings.activation = activation;
  settings.scope = scope;
  settings.k = k;
  return settings;
}

/// Different for neighbouring features; some no entry exceeds, some all positive ones do, or also 0 and some negative
/// ones.
inline Problem with_bounds(Problem problem) {
  for (std::int64_t s = 0; s < problem.n_layers; ++s)
    for (std::int64_t f = 0; f < problem.n_features; ++f)
      problem.cut.push_back(f % 11 == 0  ? -0.5f
                            : f % 5 == 0 ? 0.0f
                            : f % 7 == 0 ? std::numeric_limits<float>::infinity()
                                         : 0.25f * static_cast<float>(f % 4));
  return problem;
}

}  // namespace weft::transcoder

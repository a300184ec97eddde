// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/activation/threshold_band.hpp"

#include <cmath>
#include <limits>

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// The forms whose gradient of z is alpha where active only.
constexpr JumpForm kForms[] = {JumpForm::anthropic, JumpForm::crosslayer_coding, JumpForm::clt_forge,
                               JumpForm::openmoss, JumpForm::saelens};

/// A list of pre-activations by token, and the same by feature.
struct Lists {
  std::int64_t n_tokens, n_layers, n_features;
  std::vector<std::int64_t> row_offsets{0}, hit_offsets;
  std::vector<std::uint32_t> key, token, position;
  std::vector<float> value;

  /// Each key with probability `density`; the first feature has every token, token 2 has no entry, the last feature
  /// none.
  Lists(std::int64_t tokens, std::int64_t layers, std::int64_t features, float density)
      : n_tokens(tokens), n_layers(layers), n_features(features) {
    const std::int64_t n_keys = layers * features;
    const std::vector<float> chance = random_floats(tokens * n_keys, 1), z = random_floats(tokens * n_keys, 2);
    for (std::int64_t n = 0; n < tokens; ++n) {
      for (std::int64_t k = 0; k < n_keys && n != 2; ++k) {
        const std::size_t i = static_cast<std::size_t>(n * n_keys + k);
        if (k > 0 && (std::abs(chance[i]) > density || k == n_keys - 1)) continue;
        key.push_back(static_cast<std::uint32_t>(k));
        value.push_back(z[i]);
      }
      row_offsets.push_back(std::ssize(key));
    }
    for (std::int64_t k = 0; k <= n_keys; ++k) {
      hit_offsets.push_back(std::ssize(token));
      for (std::int64_t n = 0; n < tokens && k < n_keys; ++n)
        for (std::int64_t i = row_offsets[n]; i < row_offsets[n + 1]; ++i)
          if (key[i] == k)
            token.push_back(static_cast<std::uint32_t>(n)), position.push_back(static_cast<std::uint32_t>(i));
    }
    // Garbage beyond the entries in use.
    key.insert(key.end(), 3, 0xfffffffeu);
    value.insert(value.end(), 3, std::numeric_limits<float>::quiet_NaN());
    token.insert(token.end(), 3, 0xfffffffeu);
    position.insert(position.end(), 3, 0xfffffffeu);
  }
  std::int64_t entries() const { return row_offsets.back(); }
};

}  // namespace

TEST_CASE("every z that is active or in the band exceeds the bound of the band, which is near its border") {
  for (const JumpForm form : kForms)
    for (const float bandwidth : {0.01f, 0.3f, 2.0f, 1e-7f})
      for (const float theta : {1e-3f, 0.1f, 0.29f, 1.0f / 3, 17.0f}) {
        const JumpRule rule = jump_rule(form, bandwidth);
        const float bound = threshold_band_bound(rule, theta), border = theta - bandwidth / 2;
        CHECK(bound <= jump_bound(rule, theta));
        const double expected = rule.positive_only ? std::max(border, 0.0f) : border;
        CHECK(std::abs(static_cast<double>(bound) - expected) <= 1e-6 * static_cast<double>(theta + bandwidth));
        // Steps of one unit in the last place about both borders of what must be listed.
        for (const float about : {border, theta, 0.0f, bound}) {
          float z = about;
          for (int i = 0; i < 40; ++i) z = std::nextafter(z, -std::numeric_limits<float>::infinity());
          for (int i = 0; i < 80; ++i, z = std::nextafter(z, std::numeric_limits<float>::infinity()))
            if (jump_is_active(rule, z, theta) || jump_factor(rule, z, theta) != 0.0f) REQUIRE(z > bound);
        }
      }
  CHECK(std::isnan(threshold_band_bound(jump_rule(JumpForm::anthropic, 1), std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("bounds of the band follow the bandwidth of the step") {
  for_each_backend([&](const Execution& execution) {
    const std::vector<float> theta = {0.1f, 0.5f, 3.0f};
    AdamStep adam{};
    adam.step = 6;
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
    const DeviceArray<float> thresholds(theta), bounds(3);
    const JumpRule rule = jump_rule(JumpForm::anthropic, 0.2f), wide = jump_rule(JumpForm::anthropic, 1.2f);
    threshold_band_bounds(execution, {rule}, thresholds.array(), bounds.array());
    for (std::size_t i = 0; i < 3; ++i) CHECK(bounds.values()[i] == threshold_band_bound(rule, theta[i]));
    // Half way from 2.2 to 0.2.
    threshold_band_bounds(execution, {rule, {0.2f, 1, 11, 2.2f}, step.data()}, thresholds.array(), bounds.array());
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(bounds.values()[i] == doctest::Approx(threshold_band_bound(wide, theta[i])));
  });
}

TEST_CASE("activations, gradients of z and of thresholds from a list equal float64 sums over its entries") {
  for_each_backend([&](const Execution& execution) {
    for (const JumpForm form : kForms)
      for (const Lists& lists : {Lists(1, 1, 1, 1), Lists(5, 2, 3, 0), Lists(301, 3, 41, 0.4f), Lists(70, 1, 9, 3)}) {
        CAPTURE(static_cast<int>(form));
        CAPTURE(lists.n_tokens);
        const std::int64_t n_keys = lists.n_layers * lists.n_features, stride = lists.n_features + 4;
        const JumpRule rule = jump_rule(form, 0.7f);
        std::vector<float> theta = random_floats(lists.n_layers * stride, 4, 0.3f);
        for (float& t : theta) t = std::abs(t) + 0.01f;
        const std::vector<float> alpha = random_floats(std::ssize(lists.value), 5);
        const auto theta_of = [&](std::int64_t k) {
          return theta[k / lists.n_features * stride + k % lists.n_features];
        };

        const DeviceArray<std::int64_t> row_offsets(lists.row_offsets), hit_offsets(lists.hit_offsets);
        const DeviceArray<std::uint32_t> key(lists.key), token(lists.token), position(lists.position);
        const DeviceArray<float> value(lists.value), thresholds(theta), gradient(alpha),
            activation(std::vector<float>(lists.value.size(), 7.0f)), theta_gradient(std::vector<float>(n_keys, 9.0f));
        const DeviceArray<std::int64_t> active_offsets(std::vector<std::int64_t>(n_keys + 1, -1));
        const SparseActivations listed{lists.n_tokens,      lists.n_layers, lists.n_features,
                                       row_offsets.array(), key.array(),    value.array()};
        const Matrix<const float> of_features{thresholds.data(), lists.n_layers, lists.n_features, stride};
        jump_activations(execution, rule, listed, of_features, activation.array());
        threshold_band_backward(execution, {rule}, listed, {hit_offsets.array(), token.array(), position.array()},
                                of_features, gradient.array(), {theta_gradient.array(), active_offsets.array()});
        const std::vector<float> activations = activation.values(), dz = gradient.values(),
                                 sums = theta_gradient.values();
        const std::vector<std::int64_t> offsets = active_offsets.values();
        for (std::int64_t i = 0; i < lists.entries(); ++i) {
          const bool active = jump_is_active(rule, lists.value[i], theta_of(lists.key[i]));
          REQUIRE(activations[i] == (active ? lists.value[i] : 0.0f));
          REQUIRE(dz[i] == (active ? alpha[i] : 0.0f));
        }
        REQUIRE(activations.back() == 7.0f);  // beyond the entries in use
        std::int64_t active = 0;
        for (std::int64_t k = 0; k < n_keys; ++k) {
          REQUIRE(offsets[k] == active);
          double sum = 0, size = 0;
          for (std::int64_t hit = lists.hit_offsets[k]; hit < lists.hit_offsets[k + 1]; ++hit) {
            const std::uint32_t at = lists.position[hit];
            const double term = static_cast<double>(jump_factor(rule, lists.value[at], theta_of(k))) * alpha[at];
            sum += term;
            size += std::abs(term);
            active += jump_is_active(rule, lists.value[at], theta_of(k)) ? 1 : 0;
          }
          // fp64 sums, rounded once to fp32.
          REQUIRE(std::abs(sums[k] - sum) <= 2 * kRoundoff * size);
        }
        REQUIRE(offsets[n_keys] == active);
      }
  });
}

}  // namespace weft::testing

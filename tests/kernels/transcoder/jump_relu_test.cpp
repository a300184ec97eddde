// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/activation/jump_relu.hpp"

#include "kernels/gradient/gradient.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr JumpForm kForms[] = {JumpForm::anthropic, JumpForm::crosslayer_coding, JumpForm::goreg,
                               JumpForm::clt_forge, JumpForm::openmoss,          JumpForm::saelens};

/// The table of the published forms in float64, written a second time.
struct Expected {
  bool active, passes;
  double factor;
};
Expected expected(JumpForm form, double z, double theta, double bandwidth) {
  const double distance = z - theta, half = bandwidth / 2;
  const bool open = std::abs(distance) < half;
  switch (form) {
    case JumpForm::anthropic:
      return {z > theta, z > theta, open ? -theta / bandwidth : 0};
    case JumpForm::crosslayer_coding:
      return {z >= theta, z >= theta, std::abs(distance) <= half ? -z / bandwidth * theta : 0};
    case JumpForm::goreg:
      return {z > theta && z > 0, z >= 0, distance > -half && distance <= half ? -theta / bandwidth : 0};
    case JumpForm::openmoss:
      return {z > theta, z > theta, open && z > 0 ? -theta / bandwidth * theta : 0};
    case JumpForm::clt_forge:
    case JumpForm::saelens:
      return {z > theta, z > theta, open ? -theta / bandwidth * theta : 0};
  }
  return {};
}

}  // namespace

TEST_CASE(
    "each published form: activity, gradient that passes and factor at 0, theta, the borders of its band and "
    "between") {
  for (const JumpForm form : kForms) {
    CAPTURE(static_cast<int>(form));
    // Sums and halves of these are exact in fp32, so the borders are met exactly.
    for (const float bandwidth : {2.0f, 1.0f, 0.0625f})
      for (const float theta : {0.125f, 0.75f, 2.0f}) {
        const JumpRule rule = jump_rule(form, bandwidth);
        const float half = 0.5f * bandwidth;
        for (const float z : {0.0f, -0.0f, theta, theta - half, theta + half, theta - half / 2, theta + half / 2,
                              theta - 2 * half, theta + 2 * half, 0.5f * theta, -0.25f}) {
          CAPTURE(theta);
          CAPTURE(bandwidth);
          CAPTURE(z);
          Expected e = expected(form, z, theta, bandwidth);
          // The selection knows positive values only; no threshold here is negative.
          CHECK(jump_is_active(rule, z, theta) == e.active);
          CHECK(jump_passes_gradient(rule, z, theta) == e.passes);
          CHECK(static_cast<double>(jump_factor(rule, z, theta)) == e.factor);
          CHECK((z > jump_bound(rule, theta)) == e.active);
        }
      }
    const JumpRule rule = jump_rule(form, 1.0f);
    CHECK(rule.logarithmic == (form != JumpForm::goreg));
    // Neighbours of the threshold: only an inclusive test takes theta itself.
    const float theta = 0.3f, below = bits_float(float_bits(theta) - 1), above = bits_float(float_bits(theta) + 1);
    CHECK(!jump_is_active(rule, below, theta));
    CHECK(jump_is_active(rule, theta, theta) == (form == JumpForm::crosslayer_coding));
    CHECK(jump_is_active(rule, above, theta));
  }
  // A threshold that is trained as itself may become negative: ReLU.
  const JumpRule goreg = jump_rule(JumpForm::goreg, 1.0f);
  CHECK(jump_bound(goreg, -0.5f) == 0.0f);
  CHECK(!jump_is_active(goreg, -0.25f, -0.5f));
  CHECK(jump_is_active(goreg, 0.25f, -0.5f));
}

TEST_CASE("sums over the tokens of a tile equal float64 sums, for every form and type of product") {
  for_each_backend([&](const Execution& execution) {
    for (const JumpForm form : kForms)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const auto& [n, f] :
             {std::pair<std::int64_t, std::int64_t>{1, 1}, {kRowsPerSum + 3, 300}, {2 * kRowsPerSum, 7}}) {
          CAPTURE(static_cast<int>(form));
          CAPTURE(n);
          const JumpRule rule = jump_rule(form, 0.8f);
          const TestMatrix product(random_floats(n * f, 1), n, f, type);
          const std::vector<float> z = product.values(), bias = random_floats(f, 2, 0.25f),
                                   alpha = random_floats(n * f, 3);
          std::vector<float> theta = random_floats(f, 4, 0.3f);
          for (float& t : theta) t = std::abs(t) + 0.01f;
          for (const bool replaces : {false, true}) {
            const DeviceArray<float> gradient(alpha), biases(bias), thresholds(theta);
            const DeviceArray<float> theta_sum(std::vector<float>(f, 5.0f)), bias_sum(std::vector<float>(f, -3.0f));
            const DeviceArray<std::byte> workspace(jump_backward_workspace(n, f));
            const JumpTile tile{product.view(), biases.array(), thresholds.array(), gradient.matrix(n, f), replaces};
            JumpSums sums{theta_sum.array(), {}};
            if (replaces) sums.bias = bias_sum.array();
            jump_backward(execution, rule, tile, true, sums, workspace.array());
            const std::vector<float> in_place = gradient.values();
            for (std::int64_t j = 0; j < f; ++j) {
              double of_theta = 5, of_bias = -3, size = 8;
              for (std::int64_t i = 0; i < n; ++i) {
                const float pre = z[i * f + j] + bias[j];
                const Expected e = expected(form, pre, theta[j], rule.bandwidth);
                of_theta += static_cast<double>(jump_factor(rule, pre, theta[j])) * alpha[i * f + j];
                of_bias += e.passes ? alpha[i * f + j] : 0;
                size += std::abs(alpha[i * f + j]);
                REQUIRE(in_place[i * f + j] == (!replaces || e.passes ? alpha[i * f + j] : 0.0f));
              }
              // n products of at most |alpha| (factors are below 1), each sum rounded n times.
              const double tolerance = 2 * static_cast<double>(n + 2) * kRoundoff * size;
              REQUIRE(std::abs(theta_sum.values()[j] - of_theta) <= tolerance);
              REQUIRE(std::abs(bias_sum.values()[j] - (replaces ? of_bias : -3)) <= tolerance);
            }
            jump_backward(execution, rule, tile, false, sums, workspace.array());
            REQUIRE(std::abs(theta_sum.values()[0]) < 5 + 2 * static_cast<double>(n));  // overwritten
          }
        }
  });
}

TEST_CASE("thresholds move by Adam on their logarithm or on themselves; without a gradient they keep their bits") {
  for_each_backend([&](const Execution& execution) {
    for (const JumpForm form : {JumpForm::anthropic, JumpForm::goreg}) {
      const JumpRule rule = jump_rule(form, 1.0f);
      AdamStep adam{};
      adam.learning_rate = 0.01f;
      adam.beta1 = 0.9f;
      adam.beta2 = 0.999f;
      adam.first_gain = 0.1f;
      adam.second_gain = 0.001f;
      adam.epsilon = 1e-8f;
      adam.first_correction = 10.0f;
      adam.second_correction = 1000.0f;
      adam.gradient_scale = 0.5f;
      const std::vector<float> before = {0.03f, 0.1f, 0.7f, 0.123f};
      const DeviceArray<float> theta(before), first(4), second(4),
          gradient(std::vector<float>{2.0f, -3.0f, 1e-4f, 0.0f});
      const ParameterVector vector{theta.array(), first.array(), second.array()};
      adam.withheld = 1;
      const DeviceArray<AdamStep> withheld(std::vector<AdamStep>{adam});
      update_thresholds(execution, rule, vector, gradient.array(), withheld.data());
      CHECK(theta.values() == before);
      adam.withheld = 0;
      const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
      update_thresholds(execution, rule, vector, gradient.array(), step.data());
      const std::vector<float> after = theta.values();
      for (std::size_t i = 0; i < 3; ++i) {
        const double g = 0.5 * gradient.values()[i];
        // The first step of Adam: the sign of the gradient.
        const double change = -0.01 * g / (std::abs(g) + 1e-8);
        const double moved = rule.logarithmic ? before[i] * std::exp(change) : before[i] + change;
        // A handful of roundings of numbers near theta, in g / |g| and in exp.
        CHECK(std::abs(after[i] - moved) <= 16 * kRoundoff * std::abs(moved));
      }
      CHECK(after[3] == before[3]);
      DeviceArray<double> squares(std::vector<double>{1, 0, 0, 0});
      add_row_squares(execution, {gradient.data(), 4, 1, 1}, step.data(), squares.array());
      CHECK(squares.values()[0] == 2.0);
      CHECK(squares.values()[1] == 2.25);
      add_row_squares(execution, {gradient.data(), 1, 4, 4}, nullptr, squares.array());
      CHECK(squares.values()[0] == doctest::Approx(2.0 + 13.0 + 1e-8).epsilon(1e-12));
    }
  });
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/exponential.hpp"

#include <cmath>
#include <limits>

#include "tests/test.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// |got - want| in units of the last place of an fp32 near want.
double ulps(float got, double want) {
  int exponent = 0;
  std::frexp(static_cast<float>(want), &exponent);
  return std::abs(got - want) / std::ldexp(1.0, exponent - 24);
}

}  // namespace

TEST_CASE("exponential, sigmoid and hyperbolic_tangent are within their stated errors of float64") {
  double exp_error = 0, sigmoid_error = 0, tanh_error = 0;
  // Every 4099th fp32 of either sign up to 89.
  for (std::uint32_t bits = 0; bits < float_bits(89.0f); bits += 4099)
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = bits_float(bits | sign);
      const double e = std::exp(static_cast<double>(x)), s = 1 / (1 + std::exp(-static_cast<double>(x)));
      const double t = std::tanh(static_cast<double>(x));
      const double least = std::numeric_limits<float>::min(), most = std::numeric_limits<float>::max();
      if (e >= least && e <= most) exp_error = std::max(exp_error, ulps(exponential(x), e));
      if (s >= 2 * least) sigmoid_error = std::max(sigmoid_error, ulps(sigmoid(x), s));
      if (std::abs(t) >= least) tanh_error = std::max(tanh_error, ulps(hyperbolic_tangent(x), t));
    }
  CHECK(exp_error <= 1.0);
  CHECK(sigmoid_error <= 2.5);
  CHECK(tanh_error <= 1.5);
}

TEST_CASE("exponential, sigmoid and hyperbolic_tangent at the ends of their range") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(exponential(0) == 1);
  CHECK(exponential(-infinity) == 0);
  CHECK(exponential(-88) == 0);
  CHECK(exponential(infinity) == infinity);
  CHECK(exponential(89) == infinity);
  CHECK(std::isnan(exponential(std::nanf(""))));
  CHECK(sigmoid(-infinity) == 0);
  CHECK(sigmoid(infinity) == 1);
  CHECK(std::isnan(sigmoid(std::nanf(""))));
  CHECK(hyperbolic_tangent(infinity) == 1);
  CHECK(hyperbolic_tangent(-1e30f) == -1);
  CHECK(hyperbolic_tangent(1e-30f) == 1e-30f);
  CHECK(std::isnan(hyperbolic_tangent(std::nanf(""))));
}

}  // namespace weft::testing

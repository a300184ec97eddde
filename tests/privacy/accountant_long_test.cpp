// SPDX-License-Identifier: Apache-2.0
//
// Published values whose computation takes seconds: many steps with much loss.
#include "privacy/accountant/accountant.hpp"
#include "tests/test.hpp"

namespace weft::privacy {

TEST_CASE("prv: upper bounds of many steps") {
  const std::pair<Phase, double> expected[] = {{{.05, 3, 20'000}, 13.961115}, {{.001, 1.5, 100'000}, 1.015288}};
  for (const auto& [phase, value] : expected) {
    const double found = prv_epsilon({&phase, 1}, 1e-6).upper;
    CAPTURE(found);
    CHECK(std::abs(found - value) <= 1e-4);
  }
}

TEST_CASE("calibration by prv for much epsilon: a few evaluations") {
  const double noise = calibrate(AccountantKind::prv, 50, 1e-5, .01, 1000);
  const Phase with = {.01, noise, 1000};
  const double reached = epsilon(AccountantKind::prv, {&with, 1}, 1e-5);
  CHECK(reached <= 50);
  CHECK(reached >= 49.98);
  CHECK(std::abs(calibrate(AccountantKind::prv, 8, 1e-5, .04, 2000) - 1.2915039) < 1.2e-3);  // Opacus
}

TEST_CASE("prv: a million steps, and the same once more in two parts") {
  const std::vector<Phase> whole = {{1e-3, 2, 1'000'000}}, parts = {{1e-3, 2, 400'000}, {1e-3, 2, 600'000}};
  const PrvEpsilon bounds = prv_epsilon(whole, 1e-5);
  const double rdp = epsilon(AccountantKind::rdp, whole, 1e-5);
  CAPTURE(rdp);
  CHECK(bounds.upper < rdp);         // rdp is the looser bound
  CHECK(bounds.lower > 0.85 * rdp);  // and by 5 to 10 % where many steps lose much together
  CHECK(bounds.upper - bounds.lower < 0.025);
  CHECK(prv_epsilon(parts, 1e-5).upper == doctest::Approx(bounds.upper).epsilon(1e-6));
}

}  // namespace weft::privacy

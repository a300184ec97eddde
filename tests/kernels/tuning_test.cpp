// SPDX-License-Identifier: Apache-2.0
//
// The rule itself is tested in tests/optimizer/tuning_test.cpp.
#include <cmath>

#include "kernels/optimize/rate_tuning.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("the tuning kernel applies the rule of the header to the mean loss, unless the step is withheld") {
  for_each_backend([&](const kernels::Execution& execution) {
    TuningRule rule;
    rule.patience = 2;
    rule.down = 0.5;
    rule.lowers_on_plateau = true;
    rule.least = 0;
    const DeviceArray<TuningState> state(std::vector<TuningState>{TuningState{}});
    TuningState expected;
    for (int i = 1; i <= 30; ++i) {
      AdamStep constants{};
      constants.learning_rate = 1.0f;
      constants.step = static_cast<std::uint64_t>(i);
      constants.withheld = i % 5 == 0 ? 1 : 0;
      const DeviceArray<AdamStep> step(std::vector<AdamStep>{constants});
      const double sum = 8.0 * (3 + std::sin(i));
      const DeviceArray<double> loss(std::vector<double>{sum});
      const DeviceArray<float> scale(std::vector<float>{0.125f});
      tune_learning_rate(execution, rule, loss.data(), scale.data(), state.data(), step.data());
      if (constants.withheld == 0) tune(rule, i, 0.125 * sum, expected);
      CHECK(state.values()[0].factor == expected.factor);
      CHECK(step.values()[0].learning_rate == (constants.withheld != 0 ? 1.0f : static_cast<float>(expected.factor)));
    }
    CHECK(expected.factor < 0.1);
  });
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/guard.hpp"

#include <limits>
#include <tuple>

#include "kernels/metrics/metric_sums.hpp"
#include "kernels/optimize/adam.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// The guard's state over several steps.
struct Guarded {
  Execution execution;
  DeviceArray<StepGuard> guard{std::vector<StepGuard>{StepGuard{0, 0}}};
  DeviceArray<AdamStep> step{std::vector<AdamStep>{AdamStep{}}};
  DeviceArray<StepOutcome> outcomes{std::vector<StepOutcome>(kOutcomes)};

  StepOutcome run(std::uint64_t number, bool finite, std::int64_t skip_at_most, bool fault = false) {
    AdamStep constants{};
    constants.step = number;
    step.set({constants});
    const DeviceArray<StepFlags> flags(std::vector<StepFlags>{{finite ? 0 : 1, fault ? 1 : 0}});
    guard_step(execution, flags.data(), skip_at_most, guard.data(), step.data(), outcomes.data());
    const StepOutcome outcome = outcomes.values()[number % kOutcomes];
    CHECK(step.values()[0].withheld == static_cast<std::uint32_t>(outcome.withheld));
    return outcome;
  }
};

}  // namespace

TEST_CASE("a sum above the bound or not a number sets the flag, wherever it is; others leave it") {
  constexpr double largest = std::numeric_limits<double>::max();
  for_each_backend([&](const kernels::Execution& execution) {
    for (const auto& [value, bound, expected] : {std::tuple<double, double, std::int32_t>{1e300, largest, 0},
                                                 {std::numeric_limits<double>::infinity(), largest, 1},
                                                 {std::numeric_limits<double>::quiet_NaN(), largest, 1},
                                                 {1e36, 1e36, 0},
                                                 {1.0001e36, 1e36, 1},
                                                 {std::numeric_limits<double>::infinity(), 1e36, 1}})
      for (std::size_t place = 0; place < 3; ++place) {
        std::vector<double> values(3, 1.0);
        values[place] = value;
        const DeviceArray<double> sums(values);
        const DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
        flag_above(execution, {sums.data(), 3}, bound, flag.data());
        fence(execution);
        CHECK(flag.values()[0] == expected);
      }
  });
}

TEST_CASE("a step that is not finite is withheld, and every later step if skipping is not allowed") {
  for_each_backend([&](const kernels::Execution& execution) {
    Guarded steps{execution};
    CHECK(steps.run(1, true, 0).withheld == 0);
    const StepOutcome bad = steps.run(2, false, 0);
    CHECK(bad.withheld == 1);
    CHECK(bad.halted == kNotFinite);
    CHECK(steps.run(3, true, 0).withheld == 1);
    CHECK(steps.run(4, true, 0).withheld == 1);
  });
}

TEST_CASE("a fault of the model halts the run, although steps that are not finite may be skipped") {
  for_each_backend([&](const kernels::Execution& execution) {
    Guarded steps{execution};
    CHECK(steps.run(1, false, 2).halted == kRuns);
    const StepOutcome fault = steps.run(2, true, 2, true);
    CHECK(fault.withheld == 1);
    CHECK(fault.halted == kModelFault);
    CHECK(fault.skipped == 1);
    const StepOutcome next = steps.run(3, false, 2);
    CHECK(next.withheld == 1);
    CHECK(next.halted == kModelFault);  // the first reason stays
    CHECK(next.skipped == 1);
  });
}

TEST_CASE("skip_at_most steps are skipped, the next one halts the run") {
  for_each_backend([&](const kernels::Execution& execution) {
    Guarded steps{execution};
    for (std::uint64_t number : {1u, 3u}) {
      const StepOutcome bad = steps.run(number, false, 2);
      CHECK(bad.withheld == 1);
      CHECK(bad.halted == 0);
      CHECK(steps.run(number + 1, true, 2).withheld == 0);
    }
    const StepOutcome last = steps.run(5, false, 2);
    CHECK(last.halted == kNotFinite);
    CHECK(last.skipped == 2);
    CHECK(steps.run(6, true, 2).withheld == 1);
  });
}

TEST_CASE("a withheld step changes neither parameters nor moments, even if its gradient is not finite") {
  for_each_backend([&](const kernels::Execution& execution) {
    AdamStep constants{};
    constants.learning_rate = 0.1f;
    constants.gradient_scale = constants.first_correction = constants.second_correction = 1.0f;
    constants.withheld = 1;
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{constants});
    const DeviceArray<float> w(std::vector<float>{1.0f, 2.0f}), m(2), v(2);
    const DeviceArray<float> gradient(std::vector<float>{std::numeric_limits<float>::quiet_NaN(), 3.0f});
    adam_vector(execution, {w.array(), m.array(), v.array()}, gradient.array(), step.data());
    for (const StorageType storage : kPolicies) {
      Parameters rows(execution.backend, storage, 1, 2, 2);
      rows.set({{1.0f, 2.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}});
      const std::string before = rows.bits();
      adam_rows(execution, rows.view(), 0, gradient.matrix(1, 2), step.data());
      CHECK((rows.bits() == before));
    }
    CHECK(w.values() == std::vector<float>{1.0f, 2.0f});
    CHECK(m.values() == std::vector<float>{0.0f, 0.0f});
    CHECK(v.values() == std::vector<float>{0.0f, 0.0f});
  });
}

TEST_CASE("join_norms undoes the scaling of the rows, and clip_to_norm follows from the norm") {
  for_each_backend([&](const kernels::Execution& execution) {
    AdamStep constants{};
    constants.gradient_scale = 0.5f;
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{constants});
    const DeviceArray<double> rows(std::vector<double>{2.25}), bias(std::vector<double>{7.0}), squared(1), norm(1);
    join_norms(execution, rows.data(), true, bias.data(), step.data(), squared.data());
    CHECK(squared.values()[0] == 16.0);  // 2.25 / 0.25 + 7
    keep_norm(execution, squared.data(), step.data(), norm.data());
    CHECK(norm.values()[0] == 4.0);
    clip_to_norm(execution, norm.data(), 1.0, step.data());
    CHECK(step.values()[0].gradient_scale == 0.25f);
    clip_to_norm(execution, norm.data(), 5.0, step.data());
    CHECK(step.values()[0].gradient_scale == 1.0f);
    join_norms(execution, rows.data(), false, bias.data(), step.data(), squared.data());
    CHECK(squared.values()[0] == 9.25);
  });
}

}  // namespace weft::testing

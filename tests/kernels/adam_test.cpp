// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/adam.hpp"

#include <limits>

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Shape {
  std::int64_t rows, columns, segment;
};
// One element; short blocks; a block of exactly 256; three blocks of which the last is short, over two target layers.
constexpr Shape kShapes[] = {{1, 1, 1},     {3, 14, 7},      {5, 256, 256},   {4, 1540, 770},
                             {2, 771, 257}, {37, 1152, 384}, {5, 6912, 2304}, {16, 768, 768}};

std::vector<double> wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_CASE("every 8-bit code is a distinct number and survives the round trip") {
  for (int code = 0; code < 256; ++code) {
    const float value = code_to_float(static_cast<std::uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      CHECK(std::isnan(value));
      continue;
    }
    // The definition of e4m3: bias 7, subnormals below 2^-6.
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const double expected = exponent == 0 ? mantissa * 0x1p-9 : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
    REQUIRE(value == (code & 0x80 ? -expected : expected));
    for (const std::uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) REQUIRE(code_stochastic(value, random) == code);
  }
  CHECK(code_to_float(0x7e) == kLargestCode);
}

TEST_CASE("8-bit codes stay within the largest, and NaN stays NaN") {
  for (const std::uint32_t random : {0u, 0xffffu}) {
    CHECK(code_stochastic(449.0f, random) == 0x7e);
    CHECK(code_stochastic(std::numeric_limits<float>::infinity(), random) == 0x7e);
    CHECK(code_stochastic(-1e30f, random) == 0xfe);
    CHECK((code_stochastic(std::numeric_limits<float>::quiet_NaN(), random) & 0x7f) == kCodeNaN);
  }
}

TEST_CASE("stochastic 8-bit codes are unbiased between all neighbours") {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = code_to_float(static_cast<std::uint8_t>(code)),
                high = code_to_float(static_cast<std::uint8_t>(code + 1));
    const float value = low + (high - low) * 0.25f;
    int up = 0;
    for (std::uint32_t random = 0; random < 65536; random += 16) {
      const int chosen = code_stochastic(value, random);
      REQUIRE((chosen == code || chosen == code + 1));
      REQUIRE(code_stochastic(-value, random) == (0x80 | chosen));
      up += chosen == code + 1;
    }
    REQUIRE(up == 1024);  // a quarter of the 4,096 random words, which are evenly spaced
  }
}

TEST_CASE("no second moment of a coded block gets the code zero") {
  for (const std::uint32_t random : {0u, 0xffffu}) {
    CHECK(code_stochastic_root(1e-30f, random) == 1);
    CHECK(code_stochastic_root(0x1p-10f, random) == 1);
    CHECK(code_stochastic_root(0.0f, random) == 1);
  }
}

TEST_CASE("adam_rows agrees with the rule in float64 on every storage storage and shape") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const StorageType storage : kPolicies)
      for (const Shape& shape : kShapes) {
        CAPTURE(static_cast<int>(storage));
        CAPTURE(shape.columns);
        const std::int64_t size = shape.rows * shape.columns;
        Parameters parameters(execution.backend, storage, shape.rows, shape.columns, shape.segment, 11, 1000);
        parameters.set(random_state(size, 5));
        const Values before = parameters.values();
        const std::vector<float> gradient = random_floats(size, 9, 0.1f);
        const DeviceArray<float> device_gradient(gradient);
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
        adam_rows(execution, parameters.view(), 0, device_gradient.matrix(shape.rows, shape.columns), step.data());
        CHECK(agrees_with_adam(parameters, before, wide(gradient), std::vector<double>(size, 0.0), test_step()));
      }
  });
}

TEST_CASE("a first step from moments that are zero agrees with the rule; without a learning rate no weight moves") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 16, columns = 768, size = rows * columns;
    const std::vector<float> gradient = random_floats(size, 9, 0.1f);
    const DeviceArray<float> device_gradient(gradient);
    for (const StorageType storage : kPolicies)
      for (const bool moves : {true, false}) {
        CAPTURE(static_cast<int>(storage));
        Parameters parameters(execution.backend, storage, rows, columns, columns);  // all zero
        initialise_uniform(execution, parameters.view(), 0.1f, 1, Purpose::test);
        const Values before = parameters.values();
        AdamStep adam = test_step();
        if (!moves) adam.learning_rate = 0.0f;
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
        adam_rows(execution, parameters.view(), 0, device_gradient.matrix(rows, columns), step.data());
        if (moves)
          CHECK(agrees_with_adam(parameters, before, wide(gradient), std::vector<double>(size, 0.0), adam));
        else
          CHECK(parameters.values().weight == before.weight);
      }
  });
}

TEST_CASE("rows updated in two shards get the bits of one update, and the same bits every time") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 7, columns = 154, segment = 77, size = rows * columns, cut = 3;
    const std::vector<float> gradient = random_floats(size, 9, 0.1f);
    const DeviceArray<float> device_gradient(gradient);
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
    for (const StorageType storage : kPolicies) {
      CAPTURE(static_cast<int>(storage));
      const Values state = random_state(size, 3);
      const auto updated = [&](std::int64_t begin, std::int64_t end) {
        Parameters part(execution.backend, storage, end - begin, columns, segment, begin, 500);
        const auto slice = [&](const std::vector<float>& all) {
          return std::vector<float>(all.begin() + begin * columns, all.begin() + end * columns);
        };
        part.set({slice(state.weight), slice(state.first_moment), slice(state.second_moment)});
        adam_rows(execution, part.view(), 0, {device_gradient.data() + begin * columns, end - begin, columns, columns},
                  step.data());
        return part;
      };
      const Parameters whole = updated(0, rows), again = updated(0, rows), low = updated(0, cut),
                       high = updated(cut, rows);
      CHECK((whole.bits() == again.bits()));
      CHECK((whole.bits(0, cut) == low.bits()));
      CHECK((whole.bits(cut, rows) == high.bits()));
    }
  });
}

TEST_CASE("stochastic rounding of the weights is unbiased: many steps of a hundredth of the spacing arrive") {
  for_each_backend([&](const kernels::Execution& execution) {
    // The weight 1 of a bf16 matrix moves by learning_rate * 1 each step (gradient constant, moments in balance): a
    // hundredth of the spacing above 1, 2^-7. Rounded to nearest it would never move; rounded stochastically the mean
    // over 2,048 weights has moved by 4 spacings after 400 steps.
    const std::int64_t rows = 8, columns = 256, size = rows * columns;
    for (const StorageType storage : {StorageType::bf16, StorageType::eight_bit}) {
      Parameters parameters(execution.backend, storage, rows, columns, columns);
      parameters.set({std::vector<float>(size, 1.0f), std::vector<float>(size, -1.0f), std::vector<float>(size, 1.0f)});
      const DeviceArray<float> gradient(std::vector<float>(size, -1.0f));
      AdamStep adam{0x1p-7f / 100, 0.5f, 0.5f, 0.5f, 0.5f, 0.0f, 0.0f, 1.0f, 1.0f, 1.0f, 1, 1};
      DeviceArray<AdamStep> step(1);
      for (int i = 0; i < 400; ++i) {
        adam.step = i + 1;
        step.set({adam});
        adam_rows(execution, parameters.view(), 0, gradient.matrix(rows, columns), step.data());
      }
      double mean = 0;
      for (const float w : parameters.values().weight) mean += w / static_cast<double>(size);
      // One rounding has variance at most spacing^2 * p (1 - p), p = 1 / 100; 400 of them over 2,048 weights.
      const double deviation = 0x1p-7 * std::sqrt(400 * 0.01 * 0.99 / size);
      CHECK(std::abs(mean - (1.0 + 4 * 0x1p-7)) < 6 * deviation);
    }
  });
}

TEST_CASE("8-bit second moments follow a change of scale as fp32 ones do") {
  for_each_backend([&](const kernels::Execution& execution) {
    // sqrt(v) decays by 0.05 % per step while neighbouring codes are 12 % apart: rounded to nearest, nothing would
    // move. One column keeps the block's scale up; the others lose their gradient after step 200 and must decay.
    const std::int64_t columns = 256;
    std::vector<float> means;
    for (const StorageType storage : {StorageType::fp32, StorageType::eight_bit}) {
      Parameters parameters(execution.backend, storage, 1, columns, columns);
      initialise_uniform(execution, parameters.view(), 1.0f, 1, Purpose::test);
      AdamStep adam{1e-4f, 0.9f, 0.99f, 0.1f, 0.01f, 1e-8f, 0.0f, 1.0f, 1.0f, 1.0f, 1, 1};
      DeviceArray<AdamStep> step(1);
      for (int i = 0; i < 400; ++i) {
        std::vector<float> gradient(columns, i < 200 ? 1.0f : 0.0f);
        gradient[0] = 1.0f;
        const DeviceArray<float> device_gradient(gradient);
        adam.step = i + 1;
        step.set({adam});
        adam_rows(execution, parameters.view(), 0, device_gradient.matrix(1, columns), step.data());
      }
      const std::vector<float> v = parameters.values().second_moment;
      float mean = 0;
      for (std::int64_t c = 1; c < columns; ++c) mean += std::sqrt(v[c]) / (columns - 1);
      means.push_back(mean);
    }
    // Each of the 200 roundings after the change errs by up to 12 % of the value; the decay forgets none, so a column's
    // random walk reaches sqrt(200 * 0.005 * 0.125) = 35 %, their mean over 255 columns 2.3 %: 4 sigma.
    CHECK(std::abs(means[1] / means[0] - 1) < 0.1f);
  });
}

TEST_CASE("8-bit first moments of 1e-5 of their block's largest decay as fp32 ones do, and no weight drifts") {
  for_each_backend([&](const kernels::Execution& execution) {
    // Column 0 keeps its gradient. That of the others is 1e5 times smaller and ends after step 20: their codes are the
    // smallest ones, of which decay by 10 % leaves 1 to 4 in place if it is rounded to nearest. Then the weights move
    // on by about the learning rate per step.
    const std::int64_t columns = 256;
    const int end = 20, steps = 170, more = 50;
    std::vector<double> moved;  // after `end`, mean over the columns, in learning rates
    for (const StorageType storage : {StorageType::fp32, StorageType::eight_bit}) {
      Parameters parameters(execution.backend, storage, 1, columns, columns);
      AdamStep adam{1e-3f, 0.9f, 0.999f, 0.1f, 0.001f, 1e-12f, 0.0f, 1.0f, 1.0f, 1.0f, 1, 1};
      DeviceArray<AdamStep> step(1);
      const auto run = [&](int begin, int last, float small) {
        std::vector<float> gradient(columns, small);
        gradient[0] = 10.0f;
        const DeviceArray<float> device_gradient(gradient);
        for (int t = begin; t <= last; ++t) {
          adam.step = t;
          adam.first_correction = static_cast<float>(1 / (1 - std::pow(0.9, t)));
          adam.second_correction = static_cast<float>(1 / (1 - std::pow(0.999, t)));
          step.set({adam});
          adam_rows(execution, parameters.view(), 0, device_gradient.matrix(1, columns), step.data());
        }
        return parameters.values();
      };
      const Values before = run(1, end, 1e-4f), after = run(end + 1, steps, 0.0f);
      double mean = 0;
      for (std::int64_t c = 1; c < columns; ++c)
        mean += static_cast<double>(before.weight[c] - after.weight[c]) / 1e-3 / static_cast<double>(columns - 1);
      moved.push_back(mean);
      if (storage != StorageType::eight_bit) continue;
      // 0.9^150 of two codes in 255 columns: 7e-5 are expected to be left.
      for (std::int64_t c = 1; c < columns; ++c) REQUIRE(after.first_moment[c] == 0.0f);
      const Values last = run(steps + 1, steps + more, 0.0f);
      for (std::int64_t c = 1; c < columns; ++c) REQUIRE(last.weight[c] == after.weight[c]);
    }
    // A column's m is one or two codes that vanish after 10 steps on average, +-10, and sqrt(v) two or three codes:
    // +-15 learning rates for a column, +-1 for the mean, of 13.
    CHECK(moved[1] == doctest::Approx(moved[0]).epsilon(0.4));
  });
}

TEST_CASE("8-bit first moments follow their gradient at every decay, however small a step's change is") {
  for_each_backend([&](const kernels::Execution& execution) {
    // Gradients of 1/2 to 1/256 of the largest, from moments that are zero. The change per step, (1 - beta1) (g - m),
    // falls below half the distance of two codes long before m is g.
    const std::int64_t columns = 256;
    for (const float beta1 : {0.9f, 0.99f}) {
      CAPTURE(beta1);
      Parameters parameters(execution.backend, StorageType::eight_bit, 1, columns, columns);
      AdamStep adam{0.0f, beta1, 0.999f, 1 - beta1, 0.001f, 1e-12f, 0.0f, 1.0f, 1.0f, 1.0f, 1, 1};
      DeviceArray<AdamStep> step(1);
      std::vector<float> gradient(columns);
      for (std::int64_t c = 0; c < columns; ++c) gradient[c] = 1.0f / (1.0f + static_cast<float>(c));
      const DeviceArray<float> device_gradient(gradient);
      for (int t = 1; t <= 1000; ++t) {
        adam.step = t;
        step.set({adam});
        adam_rows(execution, parameters.view(), 0, device_gradient.matrix(1, columns), step.data());
      }
      const std::vector<float> m = parameters.values().first_moment;
      double ratio = 0;
      for (std::int64_t c = 1; c < columns; ++c) ratio += m[c] / gradient[c] / static_cast<double>(columns - 1);
      // A rounding errs by 9 % of m, 1 / (1 - beta1^2) of them are remembered: 4 % and 12 % for a column at the two
      // decays, divided by sqrt(255) for the mean. 5 sigma and the error of the scale, one rounding.
      CHECK(std::abs(ratio - 1) < (beta1 < 0.95f ? 0.02 : 0.05));
    }
  });
}

TEST_CASE("8-bit blocks without a gradient keep their codes until their scales are zero, and then learn again") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 32;
    for (const std::int64_t columns : {384, 257}) {  // two blocks each; 257: the kernels of any width
      const std::int64_t size = rows * columns;
      Parameters parameters(execution.backend, StorageType::eight_bit, rows, columns, columns);
      Values expected = random_state(size, 5);
      parameters.set(expected);
      expected = parameters.values();
      AdamStep adam = test_step();
      DeviceArray<AdamStep> step(1);
      // Only row 0 has a gradient: neither row 1 nor the other block of row 0 takes part in its coding.
      std::vector<float> gradient(size, 0.0f);
      gradient[0] = 1.0f;
      gradient[columns] = -0.0f;
      const DeviceArray<float> device_gradient(gradient);
      const auto run = [&](int count) {
        for (int i = 0; i < count; ++i) {
          ++adam.step;
          step.set({adam});
          adam_rows(execution, parameters.view(), 0, device_gradient.matrix(rows, columns), step.data());
        }
      };
      run(30);
      const Values after = parameters.values();
      // Coded anew, one code in 2^16 would fall at each step: with 3e5 codings several.
      for (std::int64_t i = kBlockColumns; i < size; ++i) {
        // 30 roundings of the scale, and that of the product.
        REQUIRE(std::abs(after.first_moment[i] - expected.first_moment[i] * std::pow(0.9, 30)) <=
                40 * kRoundoff * std::abs(after.first_moment[i]));
        REQUIRE(std::abs(after.second_moment[i] - expected.second_moment[i] * std::pow(0.999, 30)) <=
                80 * kRoundoff * after.second_moment[i]);
      }
      run(620);  // 0.01 * 0.9^650 < 2^-100, where block_scale is zero
      const Values before = parameters.values();
      for (std::int64_t i = kBlockColumns; i < size; ++i) REQUIRE(before.first_moment[i] == 0.0f);
      const std::vector<float> next = random_floats(size, 9, 0.1f);
      const DeviceArray<float> device_next(next);
      adam_rows(execution, parameters.view(), 0, device_next.matrix(rows, columns), step.data());
      CHECK(agrees_with_adam(parameters, before, wide(next), std::vector<double>(size, 0.0), adam));
    }
  });
}

TEST_CASE("adam_vector is the rule without weight decay") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t size = 333;
    const Values state = random_state(size, 21);
    const std::vector<float> gradient = random_floats(size, 22, 0.1f);
    const DeviceArray<float> w(state.weight), m(state.first_moment), v(state.second_moment), g(gradient);
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
    adam_vector(execution, {w.array(), m.array(), v.array()}, g.array(), step.data());
    const std::vector<float> after = w.values();
    for (std::int64_t i = 0; i < size; ++i) {
      const double exact =
          adam64(test_step(), 0.0, state.weight[i], state.first_moment[i], state.second_moment[i], gradient[i]).weight;
      // The update is at most learning_rate * |direction| with some 20 roundings, the weight one.
      REQUIRE(after[i] == doctest::Approx(exact).epsilon(1e-5));
    }
  });
}

TEST_CASE("initial weights depend on seed and global index alone and fill their range evenly") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 40, columns = 130;
    Parameters whole(execution.backend, StorageType::fp32, rows, columns, 65, 0, 7),
        part(execution.backend, StorageType::fp32, 15, columns, 65, 25, 7);
    initialise_uniform(execution, whole.view(), 0.25f, 77, Purpose::decoder_initial);
    initialise_uniform(execution, part.view(), 0.25f, 77, Purpose::decoder_initial);
    CHECK((whole.bits(25, 40) == part.bits()));
    const Values values = whole.values();
    double mean = 0, square = 0;
    for (const float w : values.weight) {
      REQUIRE(std::abs(w) <= 0.25f);
      mean += w;
      square += static_cast<double>(w) * w;
    }
    const double n = rows * columns, variance = 0.25 * 0.25 / 3;
    CHECK(std::abs(mean / n) < 5 * std::sqrt(variance / n));              // 5 sigma of the mean
    CHECK(std::abs(square / n / variance - 1) < 5 * std::sqrt(0.8 / n));  // 5 sigma of the variance (kurtosis 9/5)
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const std::uint64_t element = whole.view().global_element(i / columns, i % columns);
      const std::uint32_t word = philox(77, Purpose::decoder_initial, 0, element / 4).word[element % 4];
      REQUIRE(values.weight[i] == 0.25f * (2.0f * uniform_float(word) - 1.0f));
    }
    Parameters narrow(execution.backend, StorageType::eight_bit, rows, columns, 65, 0, 7);
    initialise_uniform(execution, narrow.view(), 0.25f, 77, Purpose::decoder_initial);
    const Values rounded = narrow.values();
    for (std::size_t i = 0; i < values.weight.size(); ++i) REQUIRE(rounded.weight[i] == to_bf16(values.weight[i]));
  });
}

TEST_CASE("weights_to_float reads every storage, and weights_from_float gives its bits back") {
  for_each_backend([&](const kernels::Execution& execution) {
    const std::int64_t rows = 5, columns = 1540, segment = 770;
    for (const StorageType storage : kPolicies) {
      Parameters parameters(execution.backend, storage, rows, columns, segment);
      parameters.set(random_state(rows * columns, 31));
      const std::vector<float> weight = parameters.values().weight;
      const DeviceArray<float> out(2 * columns);
      weights_to_float(execution, parameters.view(), 2, out.matrix(2, columns));
      CHECK(out.values() == std::vector<float>(weight.begin() + 2 * columns, weight.begin() + 4 * columns));
      const std::string stored = parameters.bits();
      weights_from_float(execution, parameters.view(), 2, out.matrix(2, columns));
      CHECK((parameters.bits() == stored));
    }
  });
}

TEST_CASE("one value that is not finite raises the flag, wherever it is") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const std::int64_t columns : {300, 304}) {  // 304: the vectorised CUDA kernels
      const std::int64_t rows = 3, size = rows * columns;
      DeviceArray<std::int32_t> flag(1);
      float largest = std::numeric_limits<float>::max();
      const auto flagged = [&](const auto& what) {
        flag.set({0});
        if constexpr (std::is_same_v<std::decay_t<decltype(what)>, AnyMatrix>)
          flag_beyond(execution, what, largest, flag.data());
        else
          flag_nonfinite(execution, what, flag.data());
        return flag.values()[0] == 1;
      };
      for (const Scalar type : {Scalar::fp32, Scalar::bf16})
        for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
          std::vector<float> values = random_floats(size, 1);
          CHECK(!flagged(TestMatrix(values, rows, columns, type).view()));
          values[size - 1] = bad;
          CHECK(flagged(TestMatrix(values, rows, columns, type).view()));
        }
      std::vector<float> values = random_floats(size, 1);
      values[17] = -96.0f;
      largest = 96.0f;
      CHECK(!flagged(TestMatrix(values, rows, columns, Scalar::bf16).view()));
      largest = 95.0f;
      CHECK(flagged(TestMatrix(values, rows, columns, Scalar::bf16).view()));
      // A gradient that is not finite makes moments and weights so; each of the three must show it on its own, the
      // 8-bit ones through scale or code.
      for (const StorageType storage : kPolicies)
        for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
          Parameters parameters(execution.backend, storage, rows, columns, columns);
          parameters.set(random_state(size, 8));
          CHECK(!flagged(parameters.view()));
          std::vector<float> gradient(size, 0.0f);
          gradient[400] = bad;
          const DeviceArray<float> device_gradient(gradient);
          const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
          adam_rows(execution, parameters.view(), 0, device_gradient.matrix(rows, columns), step.data());
          CHECK(flagged(parameters.view()));
        }
    }
  });
}

}  // namespace weft::testing

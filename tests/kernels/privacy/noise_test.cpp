// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/noise.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

const NoiseKey kKey{0x01234567, 0x89abcdef, 2, 3, 5, 7, 11, 0xffffffff};

std::vector<float> noise(const Execution& execution, std::int64_t size, std::uint64_t step, std::uint64_t parameter,
                         std::uint64_t first, double deviation = 1) {
  const DeviceArray<float> values(size);
  add_noise(execution, values.array(), deviation, noise_stream(kKey, step, parameter), first);
  return values.values();
}

}  // namespace

TEST_CASE("the generator has the published values for a key and counter of zeros and of ones") {
  // Random123, kat_vectors: philox4x32 10.
  const Random4 zeros = philox(0, Purpose{}, 0, 0), ones = philox(~0ull, Purpose{}, ~0ull, ~0ull);
  const std::uint32_t of_zeros[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                      of_ones[] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  for (int i = 0; i < 4; ++i) {
    CHECK(zeros.word[i] == of_zeros[i]);
    CHECK(ones.word[i] == of_ones[i]);
  }
}

TEST_CASE(
    "noise of a part is that part of the noise, wherever it begins, and never that of another step or parameter") {
  for_each_backend([&](const Execution& execution) {
    const std::vector<float> whole = noise(execution, 1001, 7, 3, 0);
    for (const std::int64_t first : {0, 1, 2, 337, 999, 1000})
      for (const std::int64_t size : {1, 2, 301}) {
        const std::int64_t count = std::min(size, 1001 - first);
        const std::vector<float> part = noise(execution, count, 7, 3, static_cast<std::uint64_t>(first));
        CHECK(part == std::vector<float>(whole.begin() + first, whole.begin() + first + count));
      }
    // An index beyond 2^32.
    const std::uint64_t far = (1ull << 40) + 1;
    CHECK(noise(execution, 5, 7, 3, far)[2] == noise(execution, 1, 7, 3, far + 2)[0]);
    CHECK(noise(execution, 5, 7, 3, far) != noise(execution, 5, 7, 3, 1));
    const auto equal = [&](const std::vector<float>& other) {
      std::int64_t count = 0;
      for (std::size_t i = 0; i < whole.size(); ++i) count += other[i] == whole[i];
      return count;
    };
    // Of 1001 numbers, two independent ones of about 2^26 values are equal with probability 2e-5.
    CHECK(equal(noise(execution, 1001, 8, 3, 0)) <= 2);
    CHECK(equal(noise(execution, 1001, 7, 4, 0)) <= 2);
    CHECK(equal(noise(execution, 1001, 7, 3, 1)) <= 2);
    CHECK(equal(noise(execution, 1001, 3, 7, 0)) <= 2);
    CHECK(equal(whole) == 1001);
  });
}

TEST_CASE("all 256 bits of the key, step and parameter enter") {
  const NoiseStream plain = noise_stream(kKey, 5, 6);
  const auto differs = [&](const NoiseStream& other) {
    return other.key != plain.key && other.counter != plain.counter;
  };
  for (int bit = 0; bit < 256; ++bit) {
    NoiseKey key = kKey;
    key[bit / 32] ^= 1u << bit % 32;
    CHECK(differs(noise_stream(key, 5, 6)));
  }
  for (int bit = 0; bit < 64; ++bit) {
    CHECK(differs(noise_stream(kKey, 5 ^ 1ull << bit, 6)));
    CHECK(differs(noise_stream(kKey, 5, 6 ^ 1ull << bit)));
  }
}

TEST_CASE("noise adds the deviation times a standard normal number and scales the sum, rounded once") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t size = 100;
    const std::vector<float> start = random_floats(size, 1);
    const DeviceArray<float> values(start);
    const NoiseStream stream = noise_stream(kKey, 1, 2);
    add_noise(execution, values.array(), 0.75, stream, 10, 0.3);
    const std::vector<float> got = values.values();
    for (std::int64_t i = 0; i < size; ++i) {
      const NormalPair pair = noise_pair(stream, static_cast<std::uint64_t>(10 + i) / 2);
      const double want = 0.3 * (static_cast<double>(start[i]) + 0.75 * (i % 2 == 0 ? pair.first : pair.second));
      // One rounding; log and cos of the device differ by units of 2^-53 more.
      REQUIRE(std::abs(static_cast<double>(got[i]) - want) <= 1.01 * kRoundoff * std::abs(want));
    }
    const DeviceArray<float> none(start);
    add_noise(execution, none.array(), 0, stream, 10);
    CHECK(none.values() == start);
  });
}

TEST_CASE("magnitudes beyond 6.7 deviations are reachable: uniforms have 53 bits") {
  // 32-bit uniforms would end at sqrt(2 ln 2^32) = 6.66.
  CHECK(normal_pair({{0, 0, 0, 0}}).first > 8.5);
  CHECK(normal_pair({{0, 1u << 11, 0, 0}}).first > 8.4);
  CHECK(normal_pair({{1, 0, 0, 0}}).first > 6.5);
  CHECK(normal_pair({{0, 0x80000000u, 0, 0}}).first > 6.7);
  CHECK(normal_pair({{0, 0, 0x80000000u, 0}}).first < -8.5);
  CHECK(normal_pair({{0, 0, 0x40000000u, 0}}).second > 8.5);
  for (const std::uint32_t word : {0u, 0xffffffffu}) {
    const NormalPair pair = normal_pair({{word, word, word, word}});
    CHECK(std::isfinite(pair.first));
    CHECK(std::isfinite(pair.second));
  }
}

TEST_CASE("noise has the moments, tails and independence of a normal distribution") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t size = 200000;
    const double n = static_cast<double>(size);
    const std::vector<float> values = noise(execution, size, 1, 1, 0, 3);
    double sum[5] = {}, neighbours = 0, parts = 0, beyond[4] = {};
    for (std::int64_t i = 0; i < size; ++i) {
      const double z = static_cast<double>(values[i]) / 3;
      for (int power = 1; power <= 4; ++power) sum[power] += std::pow(z, power) / n;
      if (i > 0) neighbours += z * static_cast<double>(values[i - 1]) / 3 / n;
      if (i >= size / 2) parts += z * static_cast<double>(values[i - size / 2]) / 3 / (n / 2);
      for (int k = 1; k < 4; ++k) beyond[k] += std::abs(z) > k;
    }
    // A fixed key: each bound is five deviations of the estimate.
    CHECK(std::abs(sum[1]) <= 5 / std::sqrt(n));
    CHECK(std::abs(sum[2] - 1) <= 5 * std::sqrt(2 / n));
    CHECK(std::abs(sum[3]) <= 5 * std::sqrt(15 / n));
    CHECK(std::abs(sum[4] - 3) <= 5 * std::sqrt(96 / n));
    CHECK(std::abs(neighbours) <= 5 / std::sqrt(n));
    CHECK(std::abs(parts) <= 5 / std::sqrt(n / 2));
    for (int k = 1; k < 4; ++k) {
      const double p = std::erfc(k / std::sqrt(2.0));
      CHECK(std::abs(beyond[k] / n - p) <= 5 * std::sqrt(p * (1 - p) / n));
    }
  });
}

}  // namespace weft::testing

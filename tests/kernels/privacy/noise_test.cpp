// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/noise.hpp"

#include <algorithm>

#include "base/error.hpp"
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

TEST_CASE("ChaCha20 has the values of RFC 8439, sections 2.3.2 and A.1") {
  ChachaKey key;  // bytes 00, 01, …, 1f
  for (std::uint32_t i = 0; i < 8; ++i) key.word[i] = 0x03020100u + 0x04040404u * i;
  const ChachaBlock found = chacha20(key, {{1, 0x09000000u, 0x4a000000u, 0}}), zeros = chacha20({}, {}),
                    next = chacha20({}, {{1, 0, 0, 0}});
  const std::uint32_t expected[16] = {0xe4e7f110u, 0x15593bd1u, 0x1fdd0f50u, 0xc47120a3u, 0xc7f4d1c7u, 0x0368c033u,
                                      0x9aaa2204u, 0x4e6cd4c3u, 0x466482d2u, 0x09aa9f07u, 0x05d7c214u, 0xa2028bd9u,
                                      0xd19c12b5u, 0xb94e16deu, 0xe883d0cbu, 0x4e3c50a2u},
                      of_zeros[16] = {0xade0b876u, 0x903df1a0u, 0xe56a5d40u, 0x28bd8653u, 0xb819d2bdu, 0x1aed8da0u,
                                      0xccef36a8u, 0xc70d778bu, 0x7c5941dau, 0x8d485751u, 0x3fe02477u, 0x374ad8b8u,
                                      0xf4b8436au, 0x1ca11815u, 0x69b687c3u, 0x8665eeb2u},
                      of_next[16] = {0xbee7079fu, 0x7a385155u, 0x7c97ba98u, 0x0d082d73u, 0xa0290fcbu, 0x6965e348u,
                                     0x3e53c612u, 0xed7aee32u, 0x7621b729u, 0x434ee69cu, 0xb03371d5u, 0xd539d874u,
                                     0x281fed31u, 0x45fb0a51u, 0x1f0ae1acu, 0x6f4d794bu};
  for (int i = 0; i < 16; ++i) {
    CHECK(found.word[i] == expected[i]);
    CHECK(zeros.word[i] == of_zeros[i]);
    CHECK(next.word[i] == of_next[i]);
  }
}

TEST_CASE("every key, purpose, step, parameter and block has a counter and nonce of its own") {
  const NoiseStream plain = noise_stream(kKey, 5, 6);
  const auto inputs_differ = [](const ChachaInput& a, const ChachaInput& b) {
    return !std::equal(a.word, a.word + 4, b.word);
  };
  for (int bit = 0; bit < 256; ++bit) {
    NoiseKey key = kKey;
    key[bit / 32] ^= 1u << bit % 32;
    const NoiseStream other = noise_stream(key, 5, 6);
    CHECK(!std::equal(other.key.word, other.key.word + 8, plain.key.word));
  }
  const ChachaInput input = plain.block(9);
  for (int bit = 0; bit < 56; ++bit) CHECK(inputs_differ(noise_stream(kKey, 5 ^ 1ull << bit, 6).block(9), input));
  for (int bit = 0; bit < 24; ++bit) CHECK(inputs_differ(noise_stream(kKey, 5, 6 ^ 1ull << bit).block(9), input));
  for (int bit = 0; bit < 40; ++bit) CHECK(inputs_differ(plain.block(9 ^ 1ull << bit), input));
  CHECK(inputs_differ(noise_stream(kKey, 5, 6, NoisePurpose::sampling).block(9), input));
  // The fields do not overlap.
  const ChachaInput all = noise_stream(kKey, (1ull << 56) - 1, (1u << 24) - 1).block(kNoiseBlocks - 1);
  CHECK(all.word[0] == 0xffffffffu);
  CHECK(all.word[1] == 0xffffffffu);
  CHECK(all.word[2] == 0xffffffffu);
  CHECK(all.word[3] == 0x01ffffffu);
  CHECK_THROWS_AS(noise_stream(kKey, 1ull << 56, 0), Error);
  CHECK_THROWS_AS(noise_stream(kKey, 0, 1ull << 24), Error);
}

TEST_CASE("uniform numbers are never 0 or 1, and their mean is a half") {
  CHECK(uniform_double(0, 0) > 0);
  CHECK(uniform_double(~0u, ~0u) < 1);
  CHECK(uniform_double(~0u, ~0u) == 1 - 0x1p-53);
  CHECK(uniform_double(~0u, 0xfffffbffu) < 1);
  CHECK(uniform_double(0x80000000u, 0) == 0.5);
  CHECK(uniform_double(0, 1) == 1.5 * 0x1p-64);  // 64 bits: the tails of noise are those of a normal distribution
}

TEST_CASE("noise adds the deviation times a standard normal number and scales the sum, rounded once") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t size = 100;
    const std::vector<float> start = random_floats(size, 1);
    const DeviceArray<float> values(start);
    const NoiseStream stream = noise_stream(kKey, 1, 2);
    const DeviceArray<double> unit(std::vector<double>{3});
    add_noise(execution, values.array(), 0.25, stream, 10, 0.3, unit.data());
    const std::vector<float> got = values.values();
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t element = 10 + i;
      const ChachaBlock block = chacha20(stream.key, stream.block(static_cast<std::uint64_t>(element) / kNoiseBlock));
      const NormalPair pair = noise_pair(block, static_cast<int>(element % 8 / 2));
      const double want = 0.3 * (static_cast<double>(start[i]) + 0.75 * (i % 2 == 0 ? pair.first : pair.second));
      // One rounding; log and cos of the device differ by units of 2^-53 more.
      REQUIRE(std::abs(static_cast<double>(got[i]) - want) <= 1.01 * kRoundoff * std::abs(want));
    }
    const DeviceArray<float> none(start);
    add_noise(execution, none.array(), 0, stream, 10);
    CHECK(none.values() == start);
  });
}

TEST_CASE("magnitudes beyond 8.6 deviations are reachable: uniforms have 64 bits") {
  // 32-bit uniforms would end at sqrt(2 ln 2^32) = 6.66, those of 53 bits at 8.6.
  CHECK(normal_pair({{0, 0, 0, 0}}).first > 9.4);
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

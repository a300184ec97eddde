// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/bf16.hpp"
#include "kernels/random.hpp"
#include "kernels/shared_memory.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"
#include "kernels/transcoder/select/sort_network.hpp"
#include "tests/test.hpp"

namespace weft::kernels {

TEST_CASE("bf16 keeps every one of its 65,536 patterns through fp32") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const bf16 value{static_cast<std::uint16_t>(bits)};
    const float wide = value;
    if (std::isnan(wide))
      CHECK(std::isnan(static_cast<float>(to_bf16(wide))));
    else
      REQUIRE(to_bf16(wide).bits == bits);
  }
}

TEST_CASE("half reads its whole range exactly") {
  CHECK(static_cast<float>(half{0x3c00}) == 1.0f);
  CHECK(static_cast<float>(half{0xc000}) == -2.0f);
  CHECK(static_cast<float>(half{0x7bff}) == 65504.0f);
  CHECK(static_cast<float>(half{0x0001}) == 0x1p-24f);
  CHECK(static_cast<float>(half{0x03ff}) == 1023 * 0x1p-24f);
  CHECK(static_cast<float>(half{0x7c00}) == std::numeric_limits<float>::infinity());
  CHECK(std::isnan(static_cast<float>(half{0x7e00})));
}

TEST_CASE("half keeps every one of its patterns through fp32, and rounds to the nearest, ties to even") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const half value{static_cast<std::uint16_t>(bits)};
    const float wide = value;
    if (std::isnan(wide))
      CHECK(std::isnan(static_cast<float>(to_half(wide))));
    else
      REQUIRE(to_half(wide).bits == bits);
  }
  // Between two neighbours of finite magnitude: below the middle, the middle, above it; subnormal and normal.
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = half{static_cast<std::uint16_t>(bits)}, high = half{static_cast<std::uint16_t>(bits + 1)};
    const float middle = 0.5f * (low + high), infinity = std::numeric_limits<float>::infinity();
    REQUIRE(to_half(std::nextafter(middle, 0.0f)).bits == bits);
    REQUIRE(to_half(middle).bits == bits + bits % 2);
    REQUIRE(to_half(std::nextafter(middle, infinity)).bits == bits + 1);
    REQUIRE(to_half(-middle).bits == (0x8000u | (bits + bits % 2)));
  }
  CHECK(to_half(std::nextafter(65520.0f, 0.0f)).bits == 0x7bff);
  CHECK(to_half(65520.0f).bits == 0x7c00);
  CHECK(to_half(3e38f).bits == 0x7c00);
  CHECK(to_half(-3e38f).bits == 0xfc00);
  CHECK(to_half(1e-30f).bits == 0);
}

TEST_CASE("stochastic rounding is unbiased and reaches only the two neighbours") {
  const float value = 1.0f + 0x1p-9f;  // a quarter of the way from 1 to the next bf16, 1 + 2^-7
  int up = 0;
  for (std::uint32_t random = 0; random < 65536; ++random) {
    const float rounded = to_bf16_stochastic(value, random);
    REQUIRE((rounded == 1.0f || rounded == 1.0f + 0x1p-7f));
    up += rounded > 1.0f;
  }
  CHECK(up == 16384);  // exactly a quarter of all random words
}

TEST_CASE("philox gives the published vectors and separates purposes, steps and indices") {
  // Random123 known-answer test: philox4x32-10, counter 0, key 0. Purpose 0 is no purpose, so the counter is zero.
  const Random4 zero = philox(0, static_cast<Purpose>(0), 0, 0);
  CHECK(zero.word[0] == 0x6627e8d5u);
  CHECK(zero.word[1] == 0xe169c58du);
  CHECK(zero.word[2] == 0xbc57ac4cu);
  CHECK(zero.word[3] == 0x9b00dbd8u);
  const Random4 a = philox(1, Purpose::test, 2, 3);
  CHECK(a.word[0] != philox(1, Purpose::synthetic, 2, 3).word[0]);
  CHECK(a.word[0] != philox(1, Purpose::test, 3, 3).word[0]);
  CHECK(a.word[0] != philox(1, Purpose::test, 2, 4).word[0]);
  CHECK(a.word[0] != philox(2, Purpose::test, 2, 3).word[0]);
}

TEST_CASE("the network of comparators sorts any number of words, without a place beyond them") {
  for (int n = 0; n <= 300; n = n < 40 ? n + 1 : n + 13) {
    std::vector<std::uint32_t> words, sorted;
    for (int i = 0; i < n; ++i)
      words.push_back(philox(3, Purpose::test, static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(i)).word[0] %
                      97);
    sorted = words;
    std::ranges::sort(sorted, std::greater<>());
    int size = 1;
    while (size < n) size *= 2;
    for (int run = 2; run <= size; run *= 2)
      for (int distance = run / 2; distance > 0; distance /= 2)
        for (int pair = 0; pair < size / 2; ++pair) {
          const auto [low, high] = comparator(pair, run, distance);
          REQUIRE((0 <= low && low < high && high < size));
          if (high < n && words[low] < words[high]) std::swap(words[low], words[high]);
        }
    CHECK(words == sorted);
  }
}

TEST_CASE("shared memory: static and dynamic together, of this GPU, and of every GPU where a kernel is for all") {
  using cuda::kSharedMemory, cuda::shared_memory_obstacle, cuda::SharedMemoryOf;
  constexpr std::int64_t kHopper = 227 * 1024;
  for (const std::int64_t of_device : {kSharedMemory, kHopper}) {
    CHECK(shared_memory_obstacle(kSharedMemory - 128, 128, SharedMemoryOf::every_gpu, of_device).empty());
    CHECK(shared_memory_obstacle(kSharedMemory, 128, SharedMemoryOf::every_gpu, of_device) ==
          "a block asks for 101376 bytes of dynamic shared memory and has 128 static bytes; " +
              std::string(of_device == kHopper ? "GPUs of compute capability 8.6, 8.9 and 12.x, which it is for as "
                                                 "well, have 101376"
                                               : "this GPU has 101376"));
  }
  CHECK(shared_memory_obstacle(kHopper, 0, SharedMemoryOf::this_gpu, kHopper).empty());
  CHECK(!shared_memory_obstacle(kHopper, 1, SharedMemoryOf::this_gpu, kHopper).empty());
  CHECK(!shared_memory_obstacle(kSharedMemory, 1, SharedMemoryOf::this_gpu, kSharedMemory).empty());
}

TEST_CASE("topk has shared memory on every GPU for the longest list of a token, and at least 1,024 new entries") {
  for (std::int64_t budget = 1; budget <= cuda::kMostPerToken; ++budget) {
    REQUIRE(cuda::topk_room(budget) >= std::max<std::int64_t>(2048, budget + 1024));
    REQUIRE(cuda::topk_room(budget) * std::int64_t{8} <= cuda::kSharedMemory - 6 * 1024);
  }
}

}  // namespace weft::kernels

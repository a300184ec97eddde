// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/privacy/noise.hpp"

namespace weft::kernels {
namespace {

std::uint64_t join(std::uint32_t low, std::uint32_t high) { return low | static_cast<std::uint64_t>(high) << 32; }

}  // namespace

NoiseStream noise_stream(const NoiseKey& key, std::uint64_t step, std::uint64_t parameter) {
  // Two rounds, each with 64 bits of the secret as its key and 64 as a part of its counter: all 256 bits and the whole
  // of step and parameter enter.
  const Random4 first = philox(join(key[0], key[1]), Purpose{}, step, join(key[2], key[3]));
  const Random4 second = philox(join(first.word[0] ^ key[4], first.word[1] ^ key[5]), Purpose{}, parameter,
                                join(first.word[2] ^ key[6], first.word[3] ^ key[7]));
  return {join(second.word[0], second.word[1]), join(second.word[2], second.word[3])};
}

void add_noise(const Execution& execution, Array<float> values, double deviation, const NoiseStream& stream,
               std::uint64_t first_element, double scale) {
  if (values.size == 0) return;
  const std::uint64_t first_pair = first_element / 2, odd = first_element % 2;
  const std::int64_t pairs = (values.size + static_cast<std::int64_t>(odd) + 1) / 2;
  for_all(
      execution, "add_noise", pairs, KOKKOS_LAMBDA(std::int64_t i) {
        const NormalPair normal = noise_pair(stream, first_pair + static_cast<std::uint64_t>(i));
        const std::int64_t at = 2 * i - static_cast<std::int64_t>(odd);
        const auto add = [&](std::int64_t element, double number) {
          if (element < 0 || element >= values.size) return;
          values[element] = static_cast<float>(scale * (static_cast<double>(values[element]) + deviation * number));
        };
        add(at, normal.first);
        add(at + 1, normal.second);
      });
}

}  // namespace weft::kernels

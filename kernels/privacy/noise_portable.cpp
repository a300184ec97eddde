// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/error.hpp"
#include "kernels/portable.hpp"
#include "kernels/privacy/noise.hpp"

namespace weft::kernels {

NoiseStream noise_stream(const NoiseKey& key, std::uint64_t step, std::uint64_t parameter, NoisePurpose purpose) {
  if (parameter >> 24 != 0 || step >> 56 != 0)
    throw Error(ExitCode::internal, "noise of a private run: a step or a parameter has a number that is too large");
  NoiseStream stream;
  std::copy(key.begin(), key.end(), stream.key.word);
  stream.input.word[1] = static_cast<std::uint32_t>(parameter) << 8;
  stream.input.word[2] = static_cast<std::uint32_t>(step);
  stream.input.word[3] = static_cast<std::uint32_t>(step >> 32) | static_cast<std::uint32_t>(purpose) << 24;
  return stream;
}

void add_noise(const Execution& execution, Array<float> values, double deviation, const NoiseStream& stream,
               std::uint64_t first_element, double scale, const double* unit) {
  if (values.size == 0) return;
  const std::uint64_t first_block = first_element / kNoiseBlock;
  const auto skipped = static_cast<std::int64_t>(first_element % kNoiseBlock),
             size = static_cast<std::int64_t>(kNoiseBlock);
  const std::int64_t blocks = (values.size + skipped + size - 1) / size;
  if (first_block + static_cast<std::uint64_t>(blocks) > kNoiseBlocks)
    throw Error(ExitCode::internal, "noise of a private run: a parameter has too many elements");
  for_all(
      execution, "add_noise", blocks, KOKKOS_LAMBDA(std::int64_t i) {
        const ChachaBlock block = chacha20(stream.key, stream.block(first_block + static_cast<std::uint64_t>(i)));
        const double width = unit == nullptr ? deviation : deviation * *unit;
        const auto add = [&](std::int64_t element, double number) {
          if (element < 0 || element >= values.size) return;
          values[element] = static_cast<float>(scale * (static_cast<double>(values[element]) + width * number));
        };
        for (int pair = 0; pair < 4; ++pair) {
          const NormalPair normal = noise_pair(block, pair);
          const std::int64_t at = size * i - skipped + 2 * pair;
          add(at, normal.first);
          add(at + 1, normal.second);
        }
      });
}

}  // namespace weft::kernels

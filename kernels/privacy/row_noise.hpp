// SPDX-License-Identifier: Apache-2.0
//
// Noise on parameters that have a row for each feature, in the kernels that form their gradients
// (optimize/epilogue.hpp): the numbers are those of add_noise (noise.hpp), whatever the grid and the kernel.
#pragma once

#include <cstdint>

#include "kernels/privacy/noise.hpp"

namespace weft::kernels {

/// No noise. Adds no instruction.
struct NoRowNoise {
  static constexpr bool kPresent = false;
  WEFT_HOST_DEVICE NoRowNoise of_layer(std::int64_t) const { return {}; }
  WEFT_HOST_DEVICE float add_to(float gradient, std::uint64_t, std::int64_t) const { return gradient; }
};

/// gradient <- scale * (gradient + noise), in fp64 and rounded once, of every element of the parameters of one kind in
/// all layers. Its members are kernel arguments.
struct RowNoise {
  static constexpr bool kPresent = true;
  NoiseStream stream = {};       ///< that of the parameter of layer 0
  std::uint32_t stride = 0;      ///< the parameter of a layer has the number of the one before it + stride
  double deviation = 0;          ///< of the noise, in units of *unit unless that is null
  const double* unit = nullptr;  ///< in memory of the kernels
  double scale = 1;
  /// If not null, noise that exists already, by layer and by element of the rows of this rank; replaces the stream. In
  /// memory of the kernels.
  const float* const* given = nullptr;

  /// The noise with that of `layer` as that of layer 0.
  WEFT_HOST_DEVICE RowNoise of_layer(std::int64_t layer) const {
    RowNoise noise = *this;
    noise.stream.input.word[1] += static_cast<std::uint32_t>(layer) * stride << 8;
    if (given != nullptr) noise.given += layer;
    return noise;
  }
  WEFT_HOST_DEVICE double width() const { return unit == nullptr ? deviation : deviation * *unit; }
  WEFT_HOST_DEVICE float add(float gradient, double noise) const {
    return static_cast<float>(scale * (static_cast<double>(gradient) + noise));
  }
  /// Adds to one element of layer 0. element: of the whole parameter; local: of the rows of this rank.
  WEFT_HOST_DEVICE float add_to(float gradient, std::uint64_t element, std::int64_t local) const {
    if (given != nullptr) return add(gradient, static_cast<double>(given[0][local]));
    const int inside = static_cast<int>(element % kNoiseBlock);
    const NormalPair normal = noise_pair(chacha20(stream.key, stream.block(element / kNoiseBlock)), inside / 2);
    return add(gradient, width() * (inside % 2 == 0 ? normal.first : normal.second));
  }
};

}  // namespace weft::kernels

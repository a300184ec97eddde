// SPDX-License-Identifier: Apache-2.0
//
// The vectors with which activations are normalised and errors are measured.
#pragma once

#include "dataset/activations/statistics.hpp"
#include "device/memory.hpp"
#include "kernels/execution.hpp"

namespace weft::transcoder {

/// Normalisation vectors on the device, all [L * d].
struct NormalisationOnDevice {
  NormalisationOnDevice(const dataset::Normalisation&, const dataset::Statistics&, const kernels::Execution&);
  /// What the constructor allocates for `width` = L * d.
  static std::int64_t bytes(std::int64_t width) { return 8 * width * static_cast<std::int64_t>(sizeof(float)); }

  device::Buffer<float> input_mean, input_scale;  ///< x~ = (x - mean) * scale
  device::Buffer<float> target_mean, target_scale;
  device::Buffer<float> target_spread;        ///< 1 / target_scale: factor from normalised to raw space
  device::Buffer<float> centre, standardise;  ///< normalised targets -> (y - training mean) / training deviation
  device::Buffer<float> pivot;                ///< raw training mean, about which metrics are summed
};

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Limits of the kernels that callers check before they start.
#pragma once

#include <cstddef>
#include <string>

#include "base/error.hpp"

namespace weft::kernels {

/// Largest number of layers of a transcoder. Every kernel takes the addresses of all layers' parameters as kernel
/// arguments, whose size is bounded (32,764 bytes in CUDA >= 12.1). The deepest open models have 126 layers.
constexpr int kMostLayers = 256;

/// Throws Error(usage) beyond kMostLayers. The input schema checks first; this guards kernels called otherwise.
inline void require_layers(const char* kernel, std::size_t n_layers) {
  if (n_layers > kMostLayers)
    throw Error(ExitCode::usage, std::string(kernel) + ": " + std::to_string(n_layers) + " layers (at most " +
                                     std::to_string(kMostLayers) + " are supported)");
}

}  // namespace weft::kernels

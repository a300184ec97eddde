// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward/normalisation.hpp"

#include <vector>

#include "kernels/kokkos_runtime.hpp"

namespace weft::transcoder {
namespace {

device::Buffer<float> on_device(const std::vector<float>& values, const kernels::Execution& execution) {
  device::Buffer<float> buffer(static_cast<std::int64_t>(values.size()));
  device::copy(execution, buffer.data(), values.data(), buffer.bytes(), device::Direction::to_device);
  kernels::fence(execution);  // `values` may be destroyed on return
  return buffer;
}

}  // namespace

NormalisationOnDevice::NormalisationOnDevice(const dataset::Normalisation& normalisation,
                                             const dataset::Statistics& statistics,
                                             const kernels::Execution& execution) {
  const dataset::Affine& targets = normalisation.targets;
  input_mean = on_device(normalisation.inputs.mean, execution);
  input_scale = on_device(normalisation.inputs.scale, execution);
  target_mean = on_device(targets.mean, execution);
  target_scale = on_device(targets.scale, execution);
  const std::size_t width = targets.mean.size();
  std::vector<float> spread(width), shift(width), inverse(width), mean(width);
  for (std::size_t i = 0; i < width; ++i) {
    const double scale = static_cast<double>(targets.scale[i]), deviation = statistics.targets.standard_deviation[i];
    spread[i] = static_cast<float>(1.0 / scale);
    mean[i] = static_cast<float>(statistics.targets.mean[i]);
    shift[i] = static_cast<float>((statistics.targets.mean[i] - static_cast<double>(targets.mean[i])) * scale);
    // Standardised measures exclude constant dimensions, which carry no information about the fit.
    inverse[i] = deviation > 0 ? static_cast<float>(1.0 / (scale * deviation)) : 0.0f;
  }
  target_spread = on_device(spread, execution);
  centre = on_device(shift, execution);
  standardise = on_device(inverse, execution);
  pivot = on_device(mean, execution);
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Noise that is correlated over steps, by a banded matrix (Choquette-Choo et al. 2023, arXiv:2306.08153). In place of
// z_t, independent from step to step, step t adds
//
//   zeta_t = (z_t - sum over j = 1, …, b - 1 of c_j zeta_(t-j)) / c_0          zeta = C^-1 z
//
// with C lower triangular, C_(t+j),t = c_j for b bands: the first b coefficients of the square root of the matrix of
// prefix sums, (1 - x)^(-1/2), scaled to columns of norm 1 (Kalinin and Lampert 2024, arXiv:2405.13763). Released are
// sums S_t + zeta_t: what follows from C S + z, in which a record of one step has the norm C as with independent noise.
// Noise of later steps cancels that of earlier ones in the sum of all updates. The account: as_independent
// (history.hpp).
//
// The last b - 1 zeta are state: fp32, of the same elements as the gradients of a rank. zeta_t is rounded before it is
// added, so that what is added is what later steps subtract.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/registry.hpp"
#include "kernels/privacy/noise.hpp"
#include "model/parameters.hpp"

namespace weft::privacy {

/// c_0, …, c_(bands-1).
std::vector<double> band_coefficients(std::int64_t bands);

class CorrelatedNoise {
 public:
  /// Allocates and clears the state of `bands` - 1 steps. `parameters` must outlive the object.
  CorrelatedNoise(const model::Parameters& parameters, std::int64_t bands, const kernels::Execution&);
  /// What the constructor allocates on a rank.
  static std::int64_t bytes(std::span<const model::ParameterSpec>, std::int64_t bands, const parallel::GridShape&,
                            std::int64_t rank);
  /// Bytes that are read and written per element of the gradient, also of independent noise.
  static double traffic(std::int64_t bands) { return bands == 1 ? 8 : 8 + 4 * static_cast<double>(bands + 3); }
  /// Adds the state. It is as secret as the key: without the noise, weights reveal gradients.
  void register_in(checkpoint::Registry&) const;

  bool active() const { return coefficients_.size() > 1; }
  /// Forms zeta_step of the owned rows of a matrix, or of the rows of a vector that a rank updates; returns it. z has
  /// this deviation and is that of the stream from `first_element` on. Once per step and parameter, in the order of
  /// steps.
  kernels::Array<const float> form(std::size_t parameter, double deviation, const kernels::NoiseStream&,
                                   std::uint64_t first_element, std::int64_t step);
  kernels::Array<const float> formed(std::size_t parameter, std::int64_t step) const {
    const kernels::Matrix<float>& earlier = earlier_[parameter];
    return {earlier.row(step % earlier.rows), earlier.columns};
  }
  /// values = scale * (values + zeta_step) for the owned rows of a matrix or those of a vector; as `form`.
  void add(std::size_t parameter, kernels::Array<float> values, double deviation, const kernels::NoiseStream&,
           std::uint64_t first_element, double scale, std::int64_t step);

 private:
  parallel::Range rows(std::size_t parameter) const;

  const model::Parameters& parameters_;
  const kernels::Execution execution_;
  const std::vector<double> coefficients_;
  std::vector<kernels::Matrix<float>> earlier_;  // by parameter: row t mod (b - 1) has zeta_t
  device::Buffer<float> memory_;
};

}  // namespace weft::privacy

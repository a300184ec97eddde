// SPDX-License-Identifier: Apache-2.0
#include "privacy/correlated_noise.hpp"

#include <fmt/format.h>

#include <cmath>

namespace weft::privacy {
namespace {

/// Rows of which a rank forms the gradient: those it owns, and all that it holds of a vector that every rank updates.
parallel::Range summed_rows(const model::ParameterSpec& spec, const model::RowParts& parts) {
  if (spec.frozen) return {};
  return spec.is_matrix() || spec.update == model::Update::own_rows ? parts.owned : parts.held;
}

}  // namespace

std::vector<double> band_coefficients(std::int64_t bands) {
  std::vector<double> c(static_cast<std::size_t>(bands), 1.0);
  double squares = 1;
  for (std::size_t j = 1; j < c.size(); ++j) {
    c[j] = c[j - 1] * (static_cast<double>(j) - 0.5) / static_cast<double>(j);
    squares += c[j] * c[j];
  }
  for (double& each : c) each /= std::sqrt(squares);
  return c;
}

std::int64_t CorrelatedNoise::bytes(std::span<const model::ParameterSpec> specs, std::int64_t bands,
                                    const parallel::GridShape& grid, std::int64_t rank) {
  std::int64_t elements = 0;
  for (const model::ParameterSpec& spec : specs)
    elements += summed_rows(spec, model::row_parts(spec, grid, rank)).size() * spec.columns();
  return 4 * (bands - 1) * elements;
}

parallel::Range CorrelatedNoise::rows(std::size_t parameter) const {
  return summed_rows(parameters_.specs()[parameter], parameters_.parts(parameter));
}

CorrelatedNoise::CorrelatedNoise(const model::Parameters& parameters, std::int64_t bands,
                                 const kernels::Execution& execution)
    : parameters_(parameters), execution_(execution), coefficients_(band_coefficients(bands)) {
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::int64_t size = rows(i).size() * parameters.specs()[i].columns();
    earlier_.push_back({nullptr, bands - 1, size, size});
    elements += (bands - 1) * size;
  }
  memory_ = device::Buffer<float>(elements);
  device::zero(execution, memory_.array());
  float* at = memory_.data();
  for (kernels::Matrix<float>& each : earlier_) {
    each.data = at;
    if (at != nullptr) at += each.rows * each.columns;
  }
}

void CorrelatedNoise::register_in(checkpoint::Registry& registry) const {
  for (std::size_t i = 0; i < earlier_.size(); ++i) {
    const model::ParameterSpec& spec = parameters_.specs()[i];
    const model::RowParts& parts = parameters_.parts(i);
    for (std::int64_t k = 0; k < earlier_[i].rows && !spec.frozen; ++k) {
      const std::string name = fmt::format("{}.earlier_noise_{}", spec.name, k);
      registry.add({.name = name,
                    .shape = spec.stored_shape(),
                    .held = rows(i),
                    .owned = parts.writes ? parts.owned : parallel::Range{},
                    .data = earlier_[i].row(k),
                    .on_device = true});
      registry.make_secret(name);
    }
  }
}

kernels::Array<const float> CorrelatedNoise::form(std::size_t parameter, double deviation,
                                                  const kernels::NoiseStream& stream, std::uint64_t first_element,
                                                  std::int64_t step) {
  const kernels::Matrix<float>& earlier = earlier_[parameter];
  const std::int64_t now = step % earlier.rows;
  kernels::NoiseWeights weights;
  for (std::int64_t j = 1; j <= earlier.rows; ++j)  // before the first step all are zero
    weights.of_row[(now + earlier.rows - j) % earlier.rows] = -coefficients_[static_cast<std::size_t>(j)];
  kernels::combine_noise(execution_, earlier, weights, now);
  const kernels::Array<float> noise{earlier.row(now), earlier.columns};
  kernels::add_noise(execution_, noise, deviation, stream, first_element, 1 / coefficients_[0]);
  return noise;
}

void CorrelatedNoise::add(std::size_t parameter, kernels::Array<float> values, double deviation,
                          const kernels::NoiseStream& stream, std::uint64_t first_element, double scale,
                          std::int64_t step) {
  kernels::add_given_noise(execution_, values, form(parameter, deviation, stream, first_element, step), scale);
}

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
#include "privacy/clipping.hpp"

#include <cmath>
#include <limits>

#include "base/fault.hpp"
#include "base/log.hpp"

namespace weft::privacy {

using kernels::AnyMatrix;
using kernels::Scalar;
using model::ParameterSpec;

namespace {

std::vector<ParameterSpec> held_specs(const model::Parameters& parameters) {
  std::vector<ParameterSpec> specs(parameters.specs().begin(), parameters.specs().end());
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (!specs[i].cut.over.empty())
      specs[i].shape[static_cast<std::size_t>(specs[i].cut.axis)] = parameters.parts(i).held.size();
  return specs;
}

}  // namespace

ClippedParameters::ClippedParameters(const ClippingContext& context_)
    : context(context_), specs(held_specs(context.parameters)), parts(specs, context.settings.scheme) {}

std::size_t ClippedParameters::row_of(std::size_t parameter) const {
  const bool counts = context.tensor == nullptr || context.tensor->rank() == 0 || !specs[parameter].cut.over.empty();
  return counts ? parts.part[parameter] : parts.count;
}

double part_share(std::size_t parts) {
  if (fault::point("clip-factors") == fault::Kind::skip) {
    [[maybe_unused]] static const bool warned = [] {
      log::warning(
          "WEFT_FAULT: gradients of records are not clipped; the guarantee that this run states does not hold");
      return true;
    }();
    return std::numeric_limits<double>::infinity();
  }
  return 1 / std::sqrt(static_cast<double>(parts));
}

void ClippedParameters::add_over_ranks(kernels::Array<double> squares) const {
  if (context.tensor == nullptr) return;
  context.phase("exchange");
  context.tensor->sum(squares, "norms of records");
}

AnyMatrix view(const kernels::Matrix<float>& matrix) {
  return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}
AnyMatrix view(const kernels::Matrix<kernels::bf16>& matrix) {
  return {matrix.data, Scalar::bf16, matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/adapters.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/blocks/model_parameters.hpp"

namespace weft::language_model {

using model::ParameterSpec;

namespace {

/// Number of elements that are copied at a time.
constexpr std::int64_t kPieceElements = std::int64_t{4} << 20;

/// The weights of a matrix on the device, in fp32, [rows, columns] as stored.
device::Buffer<float> weights_of(const model::Parameters& parameters, std::size_t parameter,
                                 const kernels::Execution& execution) {
  const ParameterSpec& spec = parameters.specs()[parameter];
  if (parameters.parts(parameter).held.size() != spec.rows())
    throw error(ExitCode::internal, "{} is on several ranks", spec.name);
  device::Buffer<float> values(spec.elements());
  kernels::weights_to_float(execution, parameters.matrix(parameter), 0, values.matrix(spec.rows(), spec.columns()));
  return values;
}

/// Storage form of a parameter that a product reads as [shape[0], shape[1]].
kernels::Form form_of(const ParameterSpec& spec, bool transposed = false) {
  return spec.transposed() != transposed ? kernels::Form::transposed : kernels::Form::plain;
}

kernels::AnyMatrix view_of(const device::Buffer<float>& values, const ParameterSpec& spec) {
  return {values.data(), kernels::Scalar::fp32, spec.rows(), spec.columns(), spec.columns()};
}

}  // namespace

std::vector<ParameterSpec> adapter_specs(const Architecture& architecture) {
  std::vector<ParameterSpec> specs = parameter_specs(architecture);
  std::erase_if(specs, [](const ParameterSpec& spec) { return !is_adapter(spec); });
  return specs;
}

std::vector<ParameterSpec> frozen_specs(const Architecture& architecture) {
  std::vector<ParameterSpec> specs = parameter_specs(architecture);
  std::erase_if(specs, is_adapter);
  return specs;
}

void copy_weights(const model::Parameters& from, const model::Parameters& to, const kernels::Execution& execution) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    note_progress();
    const ParameterSpec& spec = to.specs()[i];
    const std::size_t source = from.index(spec.name);
    if (!spec.is_matrix()) {
      device::copy(execution, to.vector(i).weight.data, from.vector(source).weight.data, 4 * spec.elements(),
                   device::Direction::on_device);
      continue;
    }
    const std::int64_t most = std::max<std::int64_t>(1, kPieceElements / spec.columns());
    const device::Buffer<float> staged(std::min(most, spec.rows()) * spec.columns());
    for (std::int64_t row = 0; row < spec.rows(); row += most) {
      const kernels::Matrix<float> piece = staged.matrix(std::min(most, spec.rows() - row), spec.columns());
      kernels::weights_to_float(execution, from.matrix(source), row, piece);
      kernels::weights_from_float(execution, to.matrix(i), row, piece);
    }
    kernels::fence(execution);  // before `staged` is freed
  }
}

Architecture base_of(Architecture architecture) {
  architecture.lora = {};
  return architecture;
}

void merge(const model::Parameters& adapters, const Architecture& architecture, const model::Parameters& base,
           const kernels::Execution& given) {
  kernels::Execution execution = given;
  execution.tf32 = false;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const ParameterSpec& a = adapters.specs()[i];
    if (!a.name.ends_with(kAdapterA)) continue;
    note_progress();
    const std::string target = a.name.substr(0, a.name.rfind('/'));
    const std::size_t at = base.index(target + std::string(kAdapterTarget)),
                      of_b = adapters.index(target + std::string(kAdapterB));
    const ParameterSpec &weight = base.specs()[at], &b = adapters.specs()[of_b];
    const device::Buffer<float> w = weights_of(base, at, execution), av = weights_of(adapters, i, execution),
                                bv = weights_of(adapters, of_b, execution);
    const device::Buffer<std::byte> workspace(kernels::gemm_workspace(kernels::Scalar::fp32, kernels::Scalar::fp32,
                                                                      kernels::Scalar::fp32, weight.rows(),
                                                                      weight.columns(), architecture.lora.rank));
    // W = B A, or as stored transposed: Wᵀ = Aᵀ Bᵀ.
    const bool transposed = weight.transposed();
    const ParameterSpec &left = transposed ? a : b, &right = transposed ? b : a;
    const device::Buffer<float>&left_values = transposed ? av : bv, &right_values = transposed ? bv : av;
    kernels::gemm(execution, architecture.lora.scale(), view_of(left_values, left), form_of(left, transposed),
                  view_of(right_values, right), form_of(right, transposed), 1, view_of(w, weight), workspace.array());
    device::Buffer<std::int32_t> flag(1);
    device::zero(execution, flag.data(), flag.bytes());
    kernels::flag_beyond(execution, view_of(w, weight), std::numeric_limits<float>::max(), flag.data());
    if (device::read(execution, flag.data()) != 0)
      throw error(ExitCode::numeric, "{}: its merged values are not finite; nothing was written", weight.name);
    kernels::weights_from_float(execution, base.matrix(at), 0, w.matrix(weight.rows(), weight.columns()));
    kernels::fence(execution);
  }
}

}  // namespace weft::language_model

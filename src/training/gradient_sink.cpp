// SPDX-License-Identifier: Apache-2.0
#include "training/gradient_sink.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/gradient/gradient.hpp"

namespace weft::training {
namespace {

using Form = GradientRows::Form;

/// Gradients begin at multiples of 256 bytes: vector loads need aligned rows.
constexpr std::int64_t kAlignedElements = 64;

std::int64_t aligned(std::int64_t elements) {
  return (elements + kAlignedElements - 1) / kAlignedElements * kAlignedElements;
}

/// Workspace of a parameter's gradient in any form, for rows in fp32 or bf16.
std::int64_t workspace_bytes(const ParameterSpec& spec, const RowParts& parts, std::int64_t max_rows) {
  using kernels::Scalar;
  std::int64_t bytes = spec.is_matrix() ? kernels::rows_by_id_workspace(max_rows, spec.columns())
                                        : kernels::column_sums_workspace(max_rows, parts.held.size());
  if (spec.is_matrix())
    for (const Scalar a : {Scalar::fp32, Scalar::bf16})
      for (const Scalar b : {Scalar::fp32, Scalar::bf16})
        bytes =
            std::max(bytes, kernels::gemm_workspace(a, b, Scalar::fp32, parts.held.size(), spec.columns(), max_rows));
  return bytes;
}

/// Why rows do not fit the part [held, columns] of a parameter; "" if they do.
const char* misfit(const GradientRows& rows, const ParameterSpec& spec, std::int64_t held) {
  const bool of_matrix = rows.form == Form::product || rows.form == Form::lookup;
  if (of_matrix != spec.is_matrix()) return "the form is that of a matrix, the parameter a vector, or vice versa";
  const std::int64_t out = spec.transposed() ? spec.columns() : held, in = spec.transposed() ? held : spec.columns();
  switch (rows.form) {
    case Form::product:
      if (rows.inputs.columns != in || rows.gradients.columns != out) return "the columns do not match";
      break;
    case Form::lookup:
      if (spec.transposed()) return "a table must be cut by its first axis";
      if (rows.gradients.columns != in) return "the columns do not match";
      return rows.ids.size == rows.gradients.rows ? "" : "there are not as many ids as gradient rows";
    case Form::column_sum:
      return rows.gradients.columns == held ? "" : "the columns do not match";
    case Form::column_product:
      if (rows.inputs.columns != held || rows.gradients.columns != held) return "the columns do not match";
      for (const kernels::Array<const float>& statistic : {rows.row_shift, rows.row_scale})
        if (statistic.data != nullptr && statistic.size != rows.gradients.rows)
          return "there are not as many statistics as rows";
      break;
  }
  return rows.inputs.rows == rows.gradients.rows ? "" : "inputs and gradients have different numbers of rows";
}

}  // namespace

AccumulatingSink::AccumulatingSink(const Parameters& parameters, const kernels::Execution& execution,
                                   std::int64_t max_rows)
    : parameters_(parameters), execution_(execution) {
  std::int64_t elements = 0, workspace = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    begin_.push_back(elements);
    elements += aligned(parameters.parts(i).held.size() * parameters.specs()[i].columns());
    workspace = std::max(workspace, workspace_bytes(parameters.specs()[i], parameters.parts(i), max_rows));
  }
  gradients_ = device::Buffer<float>(elements);
  workspace_ = device::Buffer<std::byte>(workspace);
  clear();
}

std::int64_t AccumulatingSink::bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                                     std::int64_t rank, std::int64_t max_rows) {
  std::int64_t elements = 0, workspace = 0;
  for (const ParameterSpec& spec : specs) {
    const RowParts parts = row_parts(spec, grid, rank);
    elements += aligned(parts.held.size() * spec.columns());
    workspace = std::max(workspace, workspace_bytes(spec, parts, max_rows));
  }
  return 4 * elements + workspace;
}

void AccumulatingSink::clear() { device::zero(execution_, gradients_.data(), gradients_.bytes()); }

void AccumulatingSink::take(const GradientRows& rows) {
  const ParameterSpec& spec = parameters_.specs()[rows.parameter];
  const parallel::Range held = parameters_.parts(rows.parameter).held;
  if (const std::string why = misfit(rows, spec, held.size()); !why.empty())
    throw error(ExitCode::internal, "gradient rows do not fit parameter \"{}\" ({})", spec.name, why);
  const kernels::AnyMatrix &x = rows.inputs, &g = rows.gradients;
  switch (rows.form) {
    case Form::product: {
      const kernels::Matrix<float> out = matrix(rows.parameter);
      return kernels::gemm(execution_, 1, spec.transposed() ? x : g, kernels::Form::transposed,
                           spec.transposed() ? g : x, kernels::Form::plain, 1,
                           {out.data, kernels::Scalar::fp32, out.rows, out.columns, out.stride}, workspace_.array());
    }
    case Form::lookup:
      return kernels::add_rows_by_id(execution_, rows.ids, g, held.begin, matrix(rows.parameter), workspace_.array());
    case Form::column_sum:
      return kernels::add_column_sums(execution_, g, vector(rows.parameter), workspace_.array());
    case Form::column_product:
      return kernels::add_column_products(execution_, x, g, rows.row_shift, rows.row_scale, vector(rows.parameter),
                                          workspace_.array());
  }
}

kernels::Matrix<float> AccumulatingSink::matrix(std::size_t parameter) const {
  const std::int64_t columns = parameters_.specs()[parameter].columns();
  return {gradients_.data() + begin_[parameter], parameters_.parts(parameter).held.size(), columns, columns};
}

kernels::Array<float> AccumulatingSink::vector(std::size_t parameter) const {
  return {gradients_.data() + begin_[parameter], parameters_.parts(parameter).held.size()};
}

}  // namespace weft::training

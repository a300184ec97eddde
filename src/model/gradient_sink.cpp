// SPDX-License-Identifier: Apache-2.0
#include "model/gradient_sink.hpp"

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/gradient/gradient.hpp"
#include "model/unit_memory.hpp"

namespace weft::model {
namespace {

using Form = GradientRows::Form;

/// Gradients begin at multiples of 256 bytes: vector loads need aligned rows.
constexpr std::int64_t kAlignedElements = 64;

std::int64_t aligned(std::int64_t elements, std::int64_t unit = kAlignedElements) {
  return (elements + unit - 1) / unit * unit;
}

/// Where the gradients of the trained parameters begin, in elements. First all matrices, then, from a multiple of kRow
/// on, all vectors. Those of one group follow one another, so that one product can form them. Where a rank owns a part
/// of its rows, the gradients of owned rows lie closer together, towards the end of the matrices; never before the held
/// rows from which they are formed, since a backward pass completes the last parameters first. With
/// KeptGradients::of_owned_rows the matrices here are the owned rows; the held rows of units, which share memory,
/// follow after `elements`.
///
/// On a grid that cuts parameters, those that nothing cuts share no row of kRow numbers with others, and of the vectors
/// they are the last, those with partial gradients at the end.
struct Layout {
  std::vector<std::int64_t> begin;  ///< first elements of the held rows
  std::vector<std::int64_t> owned;  ///< first elements of the owned rows
  std::int64_t owned_begin = 0, matrices_end = 0;
  std::int64_t vectors = 0, vectors_end = 0;
  parallel::Range partial;                ///< vectors with partial gradients
  std::vector<parallel::Range> repeated;  ///< owned rows of matrices, then vectors, that other ranks have as well
  std::int64_t elements = 0;              ///< a multiple of kRow
  std::int64_t shared = 0;                ///< elements of memory that units share
  std::int64_t workspace = 0;             ///< bytes
};

std::int64_t whole_rows(std::int64_t elements) { return aligned(elements, AccumulatingSink::kRow); }

/// Workspace of a parameter's gradient in any form, for rows in fp32 or bf16.
std::int64_t workspace_bytes(const ParameterSpec& spec, std::int64_t held, std::int64_t max_rows) {
  using kernels::Scalar;
  std::int64_t bytes = spec.is_matrix() ? kernels::rows_by_id_workspace(max_rows, spec.columns())
                                        : kernels::column_sums_workspace(max_rows, held);
  held = spec.rows_in_memory(held);
  if (spec.is_matrix())
    for (const Scalar a : {Scalar::fp32, Scalar::bf16})
      for (const Scalar b : {Scalar::fp32, Scalar::bf16})
        bytes = std::max(bytes, kernels::gemm_workspace(a, b, Scalar::fp32, held, spec.columns(), max_rows));
  return bytes;
}

/// Blocks whose gradients have memory at a time: one is computed while that of the block before is reduced.
constexpr std::int64_t kGradientSlots = 2;

/// Elements of the owned rows of all trained matrices, with those between them.
template <class Parts, class IsRepeated>
std::int64_t owned_elements(std::span<const ParameterSpec> specs, const Parts& parts, const IsRepeated& is_repeated) {
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].frozen || !specs[i].is_matrix()) continue;
    const std::int64_t size = parts(i).owned.size() * specs[i].columns();
    elements += is_repeated(i) ? whole_rows(size) + AccumulatingSink::kRow : aligned(size);
  }
  return whole_rows(elements);
}

/// parts(i): of parameter i.
template <class Parts>
Layout layout_of(std::span<const ParameterSpec> specs, std::int64_t max_rows, KeptGradients kept, const Parts& parts) {
  const bool keeps_owned = kept == KeptGradients::of_owned_rows;
  Layout layout;
  layout.begin.resize(specs.size());
  layout.owned.resize(specs.size());
  bool divided = false;
  for (std::size_t i = 0; i < specs.size(); ++i) divided = divided || parts(i).held.size() < specs[i].rows();
  const auto is_repeated = [&](std::size_t i) { return divided && parts(i).held.size() == specs[i].rows(); };
  std::int64_t end = 0;
  const auto place = [&](const auto& chosen) {
    std::int64_t held_by_group = 0;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const ParameterSpec& spec = specs[i];
      if (spec.frozen || !chosen(i)) continue;
      const bool continues = i > 0 && !spec.group.empty() && spec.group == specs[i - 1].group;
      const std::int64_t held = parts(i).held.size();
      held_by_group = held + (continues ? held_by_group : 0);
      const bool apart = spec.is_matrix() && is_repeated(i);
      layout.begin[i] = continues ? end : apart ? whole_rows(end) : aligned(end);
      end = layout.begin[i] + spec.rows_in_memory(held) * spec.columns();
      if (apart) end = whole_rows(end);
      layout.workspace = std::max(layout.workspace, workspace_bytes(spec, held_by_group, max_rows));
    }
  };
  place([&](std::size_t i) { return specs[i].is_matrix(); });
  std::optional<UnitMemory> shared;
  if (keeps_owned) {
    shared.emplace(specs, kGradientSlots, [&](std::size_t i) -> std::int64_t {
      if (specs[i].frozen || !specs[i].is_matrix()) return 0;
      return 4 * specs[i].rows_in_memory(parts(i).held.size()) * specs[i].columns();
    });
    std::fill(layout.begin.begin(), layout.begin.end(), 0);
    end = owned_elements(specs, parts, is_repeated);
  }
  layout.owned_begin = layout.matrices_end = end;
  for (std::size_t i = specs.size(); i-- > 0;) {
    if (specs[i].frozen || !specs[i].is_matrix()) continue;
    const std::int64_t held = parts(i).held.size(), owned = parts(i).owned.size();
    const std::int64_t size = owned * specs[i].columns();
    constexpr std::int64_t kRow = AccumulatingSink::kRow;
    std::int64_t first = layout.begin[i];  // where all held rows are, if all are owned
    if (owned < held || keeps_owned)
      first = std::max(first, is_repeated(i) ? layout.owned_begin / kRow * kRow - whole_rows(size)
                                             : (layout.owned_begin - size) / kAlignedElements * kAlignedElements);
    layout.owned[i] = layout.owned_begin = first;
    if (is_repeated(i)) layout.repeated.push_back({layout.owned_begin, layout.owned_begin + whole_rows(size)});
  }
  layout.vectors = end = whole_rows(end);
  place([&](std::size_t i) { return !specs[i].is_matrix() && !is_repeated(i); });
  if (divided) {
    const std::int64_t first = end = whole_rows(end);
    place([&](std::size_t i) { return !specs[i].is_matrix() && is_repeated(i) && !specs[i].partial_gradient; });
    layout.partial.begin = end;
    place([&](std::size_t i) { return !specs[i].is_matrix() && is_repeated(i) && specs[i].partial_gradient; });
    layout.partial.end = end;
    layout.repeated.push_back({first, whole_rows(end)});
  }
  layout.vectors_end = end;
  layout.elements = whole_rows(end);
  if (shared) {
    layout.shared = shared->bytes() / 4;
    for (std::size_t i = 0; i < specs.size(); ++i)
      if (specs[i].is_matrix()) layout.begin[i] = layout.elements + shared->begin(i) / 4;
  }
  return layout;
}

Layout layout_of(std::span<const ParameterSpec> specs, std::int64_t max_rows, const parallel::GridShape& grid,
                 std::int64_t rank, KeptGradients kept = KeptGradients::of_held_rows) {
  return layout_of(specs, max_rows, kept, [&](std::size_t i) { return row_parts(specs[i], grid, rank); });
}

/// Why rows do not fit the part [held, columns] of a parameter; "" if they do.
const char* misfit(const GradientRows& rows, const ParameterSpec& spec, std::int64_t held) {
  const bool of_matrix = rows.form == Form::product || rows.form == Form::lookup;
  if (of_matrix != spec.is_matrix()) return "the form is that of a matrix, the parameter a vector, or vice versa";
  const std::int64_t out = spec.transposed() ? spec.columns() : held, in = spec.transposed() ? held : spec.columns();
  switch (rows.form) {
    case Form::product:
      if (rows.inputs.columns != in) return "the columns do not match";
      if (rows.gradients.columns != out && (spec.transposed() || rows.gradients.columns != spec.rows_in_memory(out)))
        return "the columns do not match";
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
                                   std::int64_t max_rows, KeptGradients kept)
    : parameters_(parameters), execution_(execution), kept_(kept) {
  Layout layout = layout_of(parameters.specs(), max_rows, kept,
                            [&](std::size_t i) -> const RowParts& { return parameters.parts(i); });
  begin_ = std::move(layout.begin);
  owned_ = std::move(layout.owned);
  owned_begin_ = layout.owned_begin;
  matrices_end_ = layout.matrices_end;
  vectors_ = {layout.vectors, layout.vectors_end};
  partial_ = layout.partial;
  repeated_ = std::move(layout.repeated);
  elements_ = layout.elements;
  gradients_ = device::Buffer<float>(layout.elements + layout.shared);
  workspace_ = device::Buffer<std::byte>(layout.workspace);
  device::zero(execution_, gradients_.data(), gradients_.bytes());
  clear();
}

std::int64_t AccumulatingSink::bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                                     std::int64_t rank, std::int64_t max_rows, KeptGradients kept) {
  const Layout layout = layout_of(specs, max_rows, grid, rank, kept);
  return 4 * (layout.elements + layout.shared) + layout.workspace;
}

std::int64_t AccumulatingSink::elements(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                                        std::int64_t rank, KeptGradients kept) {
  return layout_of(specs, 0, grid, rank, kept).elements;
}

std::int64_t AccumulatingSink::vector_elements(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                                               std::int64_t rank) {
  const Layout layout = layout_of(specs, 0, grid, rank);
  return layout.vectors_end - layout.vectors;
}

void AccumulatingSink::clear() {
  cleared_.resize(parameters_.size());
  for (std::size_t i = 0; i < cleared_.size(); ++i) cleared_[i] = !parameters_.specs()[i].frozen;
  complete_ = cleared_.size();
}

void AccumulatingSink::complete_from(std::size_t first) {
  if (!when_complete_ || first >= complete_) return;
  for (std::size_t i = first; i < complete_; ++i)
    if (cleared_[i]) zero(i);
  when_complete_(first);
  for (std::size_t i = first; i < complete_; ++i)
    if (is_shared(i)) cleared_[i] = true;
  complete_ = first;
}

void AccumulatingSink::end_micro_batch() {
  for (std::size_t i = 0; i < cleared_.size(); ++i)
    if (cleared_[i] && !is_shared(i)) zero(i);
  if (kept_ == KeptGradients::of_owned_rows) complete_from(0);
  complete_ = cleared_.size();
}

/// True if the gradient of the held rows is in memory of other parameters as well.
bool AccumulatingSink::is_shared(std::size_t parameter) const {
  const ParameterSpec& spec = parameters_.specs()[parameter];
  return kept_ == KeptGradients::of_owned_rows && spec.is_matrix() && !spec.frozen;
}

void AccumulatingSink::zero(std::size_t parameter) {
  const std::int64_t held = parameters_.parts(parameter).held.size();
  device::zero(execution_, gradients_.data() + begin_[parameter], 4 * held * parameters_.specs()[parameter].columns());
  cleared_[parameter] = false;
}

/// True if the rows overwrite the gradients of all their parameters.
bool AccumulatingSink::is_first(const GradientRows& rows) {
  bool all = rows.form != Form::lookup && rows.gradients.rows > 0;  // a lookup writes the rows of its ids alone
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) all = all && cleared_[i];
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) {
    if (cleared_[i] && !all) zero(i);
    cleared_[i] = false;
  }
  return all;
}

void AccumulatingSink::take(const GradientRows& rows) {
  const ParameterSpec& spec = parameters_.specs()[rows.parameter];
  if (spec.frozen) return;
  const parallel::Range held = parameters_.parts(rows.parameter).held;
  if (const std::string why = misfit(rows, spec, held_by(rows)); !why.empty())
    throw error(ExitCode::internal, "gradient rows do not fit parameter \"{}\" ({})", spec.name, why);
  const kernels::AnyMatrix &x = rows.inputs, &g = rows.gradients;
  const kernels::Array<std::byte> workspace = workspace_.array();
  const auto matrix_of_all = [&]() -> kernels::Matrix<float> {
    return {gradients_.data() + begin_[rows.parameter], held_by(rows), spec.columns(), spec.columns()};
  };
  const auto vector_of_all = [&]() -> kernels::Array<float> {
    return {gradients_.data() + begin_[rows.parameter], held_by(rows)};
  };
  const bool first = is_first(rows);
  switch (rows.form) {
    case Form::product: {
      kernels::Matrix<float> out = matrix_of_all();
      if (!spec.transposed()) out.rows = g.columns;  // with the rows of zeros, or without
      if (rows.coded.any())
        return kernels::gemm_coded(execution_, spec.transposed() ? rows.coded.inputs : rows.coded.gradients,
                                   spec.transposed() ? rows.coded.gradients : rows.coded.inputs, first ? 0.0f : 1.0f,
                                   {out.data, kernels::Scalar::fp32, out.rows, out.columns, out.stride}, false,
                                   rows.coded.workspace);
      return kernels::gemm(execution_, 1, spec.transposed() ? x : g, kernels::Form::transposed,
                           spec.transposed() ? g : x, kernels::Form::plain, first ? 0 : 1,
                           {out.data, kernels::Scalar::fp32, out.rows, out.columns, out.stride}, workspace);
    }
    case Form::lookup:
      return kernels::add_rows_by_id(execution_, rows.ids, g, held.begin, matrix_of_all(), workspace);
    case Form::column_sum:
      return kernels::add_column_sums(execution_, g, vector_of_all(), first, workspace);
    case Form::column_product:
      return kernels::add_column_products(execution_, x, g, rows.row_shift, rows.row_scale, vector_of_all(), first,
                                          workspace);
  }
}

/// Held rows of the parameters that take their gradients together. Throws Error(internal) unless they are of one group.
std::int64_t AccumulatingSink::held_by(const GradientRows& rows) const {
  const std::span<const ParameterSpec> specs = parameters_.specs();
  const ParameterSpec& first = specs[rows.parameter];
  std::int64_t held = parameters_.parts(rows.parameter).held.size();
  for (std::size_t i = rows.parameter + 1; i < rows.parameter + rows.count; ++i) {
    if (i >= specs.size() || first.group.empty() || specs[i].group != first.group || first.transposed() ||
        specs[i].columns() != first.columns() || specs[i].is_matrix() != first.is_matrix())
      throw error(ExitCode::internal, "parameters from \"{}\" on are not {} of one group with one number of columns",
                  first.name, rows.count);
    held += parameters_.parts(i).held.size();
  }
  return held;
}

kernels::Matrix<float> AccumulatingSink::held(std::size_t parameter) const {
  const std::int64_t columns = parameters_.specs()[parameter].columns();
  return {gradients_.data() + begin_[parameter], parameters_.parts(parameter).held.size(), columns, columns};
}

kernels::Matrix<float> AccumulatingSink::begin_sum(std::size_t parameter, std::size_t count) {
  for (std::size_t i = parameter; i < parameter + count; ++i)
    if (cleared_[i]) zero(i);
  return held(parameter);
}

kernels::Matrix<float> AccumulatingSink::matrix(std::size_t parameter) const {
  const std::int64_t columns = parameters_.specs()[parameter].columns();
  return {gradients_.data() + owned_[parameter], parameters_.parts(parameter).owned.size(), columns, columns};
}

kernels::Array<float> AccumulatingSink::vector(std::size_t parameter) const {
  return {gradients_.data() + begin_[parameter], parameters_.parts(parameter).held.size()};
}

kernels::Array<float> AccumulatingSink::vectors() const {
  return {gradients_.data() + vectors_.begin, vectors_.size()};
}

kernels::Array<float> AccumulatingSink::partial_vectors() const {
  return {gradients_.data() + partial_.begin, partial_.size()};
}

std::int64_t AccumulatingSink::partial_elements(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                                                std::int64_t rank) {
  return layout_of(specs, 0, grid, rank).partial.size();
}

std::vector<parallel::Range> AccumulatingSink::repeated_rows() const {
  std::vector<parallel::Range> rows;
  const std::int64_t matrices = matrix_rows().rows;
  for (const parallel::Range& range : repeated_) {
    const std::int64_t first = range.begin < vectors_.begin ? -first_owned_row() : matrices - vectors_.begin / kRow;
    rows.push_back({range.begin / kRow + first, range.end / kRow + first});
  }
  return rows;
}

void AccumulatingSink::clear_gaps() {
  if (kept_ == KeptGradients::of_owned_rows) return;  // nothing else was there
  std::int64_t end = first_owned_row() * kRow;
  const auto clear_until = [&](std::int64_t next) {
    if (next > end) device::zero(execution_, gradients_.data() + end, 4 * (next - end));
  };
  for (std::size_t i = 0; i < owned_.size(); ++i) {
    if (parameters_.specs()[i].frozen || !parameters_.specs()[i].is_matrix()) continue;
    clear_until(owned_[i]);
    end = owned_[i] + parameters_.parts(i).owned.size() * parameters_.specs()[i].columns();
  }
  clear_until(whole_rows(matrices_end_));
}

kernels::Matrix<const float> AccumulatingSink::matrix_rows() const {
  const std::int64_t first = first_owned_row();
  return {gradients_.data() + first * kRow, whole_rows(matrices_end_) / kRow - first, kRow, kRow};
}

kernels::Matrix<const float> AccumulatingSink::vector_rows() const {
  return {gradients_.data() + vectors_.begin, (elements_ - vectors_.begin) / kRow, kRow, kRow};
}

}  // namespace weft::model

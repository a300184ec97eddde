// SPDX-License-Identifier: Apache-2.0
#include "privacy/record_norms.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::privacy {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Examples;
using kernels::Matrix;
using model::GradientRows;
using model::ParameterSpec;
using Form = GradientRows::Form;

RecordNorms::RecordNorms(const ClippingContext& context, ClippingBuffers&& buffers)
    : parameters_(context), buffers_(std::move(buffers)), covered_(context.parameters.size()) {
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < parameters_.specs.size(); ++i) {
    const ParameterSpec& spec = parameters_.specs[i];
    begin_.push_back(elements);
    if (spec.is_matrix() || spec.frozen) continue;
    elements += spec.elements();
    const Array<float> vector = context.sum.vector(i);
    const bool continues = !runs_.empty() && parameters_.row_of(runs_.back().parameter) == parameters_.row_of(i) &&
                           parameters_.is_partial(runs_.back().parameter) == parameters_.is_partial(i) &&
                           runs_.back().sum.data + runs_.back().sum.size == vector.data;
    if (continues)
      runs_.back().sum.size += vector.size;
    else
      runs_.push_back({i, vector});
  }
}

void RecordNorms::begin(const MicroBatch& batch) {
  batch_ = batch;
  std::fill(covered_.begin(), covered_.end(), Covered());
  open_ = covered_.size();
  device::zero(context().execution, buffers_.norms);
  device::zero(context().execution, buffers_.tied_rows);
}

// --- Norms ----------------------------------------------------------------------------------------------------------

GradientRows RecordNorms::as_stored(GradientRows rows) const {
  if (rows.form == Form::product && parameters_.specs[rows.parameter].transposed()) {
    std::swap(rows.inputs, rows.gradients);
    std::swap(rows.inputs_stay, rows.gradients_stay);
  }
  return rows;
}

void RecordNorms::cover(const GradientRows& rows) {
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) {
    if (i >= open_)
      throw error(ExitCode::internal,
                  "rows of parameter \"{}\" come after its factors have been formed; its gradient would not be bounded",
                  parameters_.specs[i].name);
    (rows.form == Form::lookup ? covered_[i].by_lookup : covered_[i].by_rows) += rows.examples.count();
  }
}

void RecordNorms::add(const GradientRows& given) {
  context().phase("norms of records");
  const GradientRows rows = as_stored(given);
  cover(rows);
  if (rows.form == Form::product) return add_product(rows);
  if (rows.form == Form::lookup) return add_lookup(rows);
  add_vector(rows);
}

std::int64_t RecordNorms::held_by(const GradientRows& rows) const {
  std::int64_t held = 0;
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) held += parameters_.specs[i].rows();
  const ParameterSpec& spec = parameters_.specs[rows.parameter];
  const std::int64_t of_rows = rows.form == Form::lookup ? spec.columns() : held;
  const bool fits =
      rows.gradients.columns >= of_rows && (rows.form != Form::product || rows.inputs.columns == spec.columns());
  if (!fits || rows.examples.count() == 0)
    throw error(ExitCode::internal, "the rows of parameter \"{}\" are not those of whole examples and of all of it",
                spec.name);
  return held;
}

AnyMatrix RecordNorms::output_gradients(const GradientRows& rows) const {
  const std::int64_t held = held_by(rows), padded = padded_rows(parameters_.specs[rows.parameter], held);
  return rows.gradients.columns_from(0, rows.gradients.columns == padded ? padded : held);
}

Array<double> RecordNorms::squares(std::size_t parameter, std::int64_t first, std::int64_t count) const {
  const auto row = static_cast<std::int64_t>(parameters_.row_of(parameter));
  return {buffers_.norms.data + row * context().shape.examples.examples + first, count};
}
Array<double> RecordNorms::squares(const GradientRows& rows) const {
  return squares(rows.parameter, rows.first_example, rows.examples.count());
}

Array<const float> RecordNorms::factors(std::size_t parameter, std::int64_t first, std::int64_t count) const {
  const auto part = static_cast<std::int64_t>(parameters_.parts.part[parameter]);
  return {buffers_.factors.data + part * context().shape.examples.examples + first, count};
}

/// Gradients of the vectors from `parameter` on, of all records.
Matrix<float> RecordNorms::vectors(std::size_t parameter, std::int64_t columns) const {
  return {buffers_.vectors.data + begin_[parameter], batch_.examples.count(), columns,
          buffers_.vectors.size / context().shape.examples.examples};
}

void RecordNorms::add_vector(const GradientRows& rows) {
  const std::int64_t columns = held_by(rows);
  const Matrix<float> sums = vectors(rows.parameter, columns);
  const Matrix<float> of_call{sums.row(rows.first_example), rows.examples.count(), columns, sums.stride};
  if (rows.form == Form::column_sum)
    kernels::form_column_sums(context().execution, rows.gradients.columns_from(0, columns), rows.examples, of_call);
  else
    kernels::form_column_products(context().execution, rows.inputs, rows.gradients, rows.row_shift, rows.row_scale,
                                  rows.examples, of_call);
}

void RecordNorms::add_product(const GradientRows& rows) {
  const AnyMatrix gradients = output_gradients(rows);
  const std::int64_t in = rows.inputs.columns;
  kernels::add_product_norms(context().execution, rows.inputs, gradients, rows.examples,
                             method_of(context().settings, in, held_by(rows), context().shape), squares(rows),
                             buffers_.workspace);
  if (!context().shape.is_tied(rows.parameter)) return;
  const auto first = static_cast<std::size_t>(rows.first_example), size = rows.examples.offsets.size();
  const Examples lookup{
      .offsets = batch_.examples.offsets.subspan(first, size),
      .device_offsets = {batch_.examples.device_offsets.data + first, static_cast<std::int64_t>(size)}};
  kernels::add_tied_rows(context().execution, rows.inputs, gradients, rows.examples, batch_.ids, first_row(rows),
                         lookup, {buffers_.tied_rows.data, buffers_.tied_rows.size / in, in, in}, buffers_.workspace);
}

void RecordNorms::add_lookup(const GradientRows& rows) {
  const std::int64_t table_rows = held_by(rows), columns = rows.gradients.columns;
  kernels::add_lookup_norms(context().execution, rows.ids, rows.gradients, first_row(rows), table_rows, rows.examples,
                            squares(rows), buffers_.workspace);
  if (context().shape.is_tied(rows.parameter))
    kernels::add_tied_norms(context().execution, rows.gradients,
                            {buffers_.tied_rows.data, rows.gradients.rows, columns, columns}, rows.examples,
                            squares(rows), buffers_.workspace);
}

// --- Factors --------------------------------------------------------------------------------------------------------

void RecordNorms::check_coverage(std::size_t first) const {
  const ClippingShape& shape = context().shape;
  const std::int64_t records = batch_.examples.count();
  for (std::size_t i = first; i < open_; ++i) {
    if (parameters_.specs[i].frozen) continue;
    const bool table = shape.is_table(i);
    const std::int64_t by_rows = table ? 0 : records, by_lookup = table || shape.is_tied(i) ? records : 0;
    if (covered_[i].by_rows != by_rows || covered_[i].by_lookup != by_lookup)
      throw error(ExitCode::internal,
                  "parameter \"{}\" is not covered by one norm per example ({} of {} from products and sums, {} of {} "
                  "from lookups); its gradient would not be bounded",
                  parameters_.specs[i].name, covered_[i].by_rows, by_rows, covered_[i].by_lookup, by_lookup);
  }
}

/// Sums over the ranks of the tensor axis, rows contiguous.
Matrix<float> RecordNorms::over_ranks(Matrix<float> partial) const {
  const Matrix<float> own{buffers_.partial.data, partial.rows, partial.columns, partial.columns};
  const std::int64_t size = own.rows * own.columns;
  kernels::copy_rows(context().execution, view(partial), view(own));
  const Array<const float> all = context().tensor->gather(Array<float>{own.data, size}, "gradients of records");
  kernels::sum_rows(context().execution, {all.data, context().tensor->size(), size, size}, {own.data, size});
  return own;
}

void RecordNorms::form_factors(std::size_t first) {
  context().phase("norms of records");
  check_coverage(first);
  if (std::all_of(parameters_.specs.begin() + static_cast<std::ptrdiff_t>(first),
                  parameters_.specs.begin() + static_cast<std::ptrdiff_t>(open_),
                  [](const ParameterSpec& spec) { return spec.frozen; })) {
    open_ = first;
    return;
  }
  const kernels::Execution& execution = context().execution;
  const std::int64_t records = batch_.examples.count(), most_records = context().shape.examples.examples;
  const auto is_open = [&](const VectorRun& run) { return run.parameter >= first && run.parameter < open_; };
  for (const VectorRun& run : runs_) {
    if (!is_open(run)) continue;
    const Matrix<float> own = vectors(run.parameter, run.sum.size);
    kernels::add_stored_norms(execution, view(parameters_.is_partial(run.parameter) ? over_ranks(own) : own),
                              squares(run.parameter, 0, records), buffers_.workspace);
  }
  // Those of records that are not there have norm 0, and nothing to scale.
  const std::vector<std::size_t>& part = parameters_.parts.part;
  const auto [least, most] = std::minmax_element(part.begin() + static_cast<std::ptrdiff_t>(first),
                                                 part.begin() + static_cast<std::ptrdiff_t>(open_));
  const auto begin = static_cast<std::int64_t>(*least) * most_records,
             size = static_cast<std::int64_t>(*most + 1) * most_records - begin;
  parameters_.add_over_ranks({buffers_.norms.data + begin, size});
  context().phase("clipping factors");
  kernels::clip_factors(execution, {buffers_.norms.data + begin, size}, parameters_.part_share(),
                        context().settings.clip_function, context().shape.summed_rows(),
                        {buffers_.factors.data + begin, size}, buffers_.bound.data);
  if (context().settings.adapts_clip())
    kernels::add_clip_balance(execution, {buffers_.factors.data, records}, &buffers_.bound[1]);
  context().phase("clipped sums");
  for (const VectorRun& run : runs_)
    if (is_open(run))
      kernels::add_clipped_examples(execution, view(vectors(run.parameter, run.sum.size)),
                                    factors(run.parameter, 0, records), run.sum);
  open_ = first;
}

std::size_t RecordNorms::whole_parts_from(std::size_t first) const {
  const std::vector<std::size_t>& part = parameters_.parts.part;
  const auto begin = part.begin(), end = begin + static_cast<std::ptrdiff_t>(open_);
  auto from = begin + static_cast<std::ptrdiff_t>(std::min(first, open_));
  while (from != begin && from != end && *std::max_element(begin, from) >= *std::min_element(from, end)) ++from;
  return static_cast<std::size_t>(from - begin);
}

// --- Clipped sums ---------------------------------------------------------------------------------------------------

void RecordNorms::add_clipped(const GradientRows& given) {
  context().phase("clipped sums");
  const GradientRows rows = as_stored(given);
  const std::int64_t columns = parameters_.specs[rows.parameter].columns();
  const Array<const float> factor = factors(rows.parameter, rows.first_example, rows.examples.count());
  float* const sum =
      context().sum.begin_sum(rows.parameter, rows.count).data;  // followed by the rows of zeros after the parameter
  if (rows.form == Form::product) {
    const AnyMatrix gradients = output_gradients(rows);
    kernels::add_clipped_product(context().execution, rows.inputs, gradients, rows.examples, factor,
                                 {sum, gradients.columns, columns, columns}, buffers_.workspace,
                                 context().settings.products);
  } else {
    kernels::add_clipped_lookup(context().execution, rows.ids, rows.gradients, first_row(rows), rows.examples, factor,
                                {sum, held_by(rows), columns, columns}, buffers_.workspace);
  }
}

void RecordNorms::complete_before(std::span<const GradientRows> rest) {
  std::size_t open = 0;
  for (const GradientRows& rows : rest) open = std::max(open, rows.parameter + rows.count);
  context().sum.complete_from(open);
}

}  // namespace weft::privacy

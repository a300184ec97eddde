// SPDX-License-Identifier: Apache-2.0
#include "privacy/clipping.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "kernels/convert/convert.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
#include "privacy/clipping_plan.hpp"

namespace weft::privacy {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Examples;
using kernels::Matrix;
using kernels::Scalar;
using training::GradientRows;
using training::ParameterSpec;

namespace {

using Form = GradientRows::Form;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kKeptAlignment - 1) / kKeptAlignment * kKeptAlignment; }

/// As the parameter is stored: of a transposed matrix, the gradient is that of a product with its operands exchanged.
GradientRows as_stored(GradientRows rows, const ParameterSpec& spec) {
  if (rows.form == Form::product && spec.transposed()) {
    std::swap(rows.inputs, rows.gradients);
    std::swap(rows.inputs_stay, rows.gradients_stay);
  }
  return rows;
}

/// Where the elements of each parameter begin in an array of an example: vectors and matrices each by themselves.
std::vector<std::int64_t> begins(std::span<const ParameterSpec> specs, const Settings& settings,
                                 const ClippingShape& shape) {
  std::vector<std::int64_t> begin;
  std::int64_t vectors = 0, matrices = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::int64_t& end = specs[i].is_matrix() ? matrices : vectors;
    begin.push_back(end);
    if (!specs[i].is_matrix() || (settings.mode == Mode::materialise && !is_table(shape, i)))
      end += padded_rows(specs[i], specs[i].rows()) * specs[i].columns();
  }
  return begin;
}

/// With the shapes of what this rank holds.
std::vector<ParameterSpec> held_specs(const training::Parameters& parameters) {
  std::vector<ParameterSpec> specs(parameters.specs().begin(), parameters.specs().end());
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (!specs[i].cut.over.empty())
      specs[i].shape[static_cast<std::size_t>(specs[i].cut.axis)] = parameters.parts(i).held.size();
  return specs;
}

AnyMatrix view(const Matrix<float>& matrix) {
  return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}
AnyMatrix view(const Matrix<kernels::bf16>& matrix) {
  return {matrix.data, Scalar::bf16, matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace

class Clipping::NormSink final : public training::GradientSink {
 public:
  explicit NormSink(Clipping& clipping) : clipping_(clipping) {}
  void take(const GradientRows& rows) override { clipping_.take(as_stored(rows, clipping_.specs_[rows.parameter])); }
  bool takes_sums() const override { return true; }
  void complete_from(std::size_t first) override { clipping_.close_from(first); }

 private:
  Clipping& clipping_;
};

class Clipping::SumSink final : public training::GradientSink {
 public:
  explicit SumSink(Clipping& clipping) : clipping_(clipping) {}
  void take(const GradientRows& rows) override {
    if (rows.form != Form::product && rows.form != Form::lookup) return;
    clipping_.phase("clipped sums");
    clipping_.add_clipped(as_stored(rows, clipping_.specs_[rows.parameter]));
  }
  void complete_from(std::size_t first) override { clipping_.sum_.complete_from(first); }

 private:
  Clipping& clipping_;
};

Clipping::Clipping(const training::Parameters& parameters, training::AccumulatingSink& sum, const Settings& settings,
                   const ClippingShape& shape, const kernels::Execution& execution, Buffers&& buffers,
                   training::TensorAxis* tensor)
    : parameters_(parameters),
      specs_(held_specs(parameters)),
      sum_(sum),
      tensor_(tensor),
      settings_(settings),
      shape_(shape),
      execution_(execution),
      parts_(specs_, settings.scheme),
      buffers_(std::move(buffers)),
      begin_(begins(specs_, settings, shape)),
      covered_(parameters.size()) {
  if (settings.algorithm == Algorithm::naive) {
    one_.emplace(parameters, execution, shape.examples.rows * shape.sum_rows);
    return;
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (specs_[i].is_matrix()) continue;
    const Array<float> vector = sum.vector(i);
    const bool continues = !vector_runs_.empty() && row_of(vector_runs_.back().parameter) == row_of(i) &&
                           is_partial(vector_runs_.back().parameter) == is_partial(i) &&
                           vector_runs_.back().sum.data + vector_runs_.back().sum.size == vector.data;
    if (continues)
      vector_runs_.back().sum.size += vector.size;
    else
      vector_runs_.push_back({i, vector});
  }
}

Clipping::~Clipping() = default;

// --- A micro-batch --------------------------------------------------------------------------------------------------

void Clipping::begin() {
  sum_.clear();
  sum_.end_micro_batch();
}

void Clipping::add(const MicroBatch& batch) {
  if (batch.examples.count() == 0) return;
  if (one_) return add_naive(batch);
  batch_ = &batch;
  const parallel::Range all{0, batch.examples.count()};
  std::fill(covered_.begin(), covered_.end(), Covered());
  waiting_.clear();
  summed_.clear();
  open_ = parameters_.size();
  kept_bytes_ = 0;
  last_kept_ = {};
  device::zero(execution_, buffers_.norms);
  device::zero(execution_, buffers_.tied_rows);
  NormSink norms(*this);
  batch.pass(all, norms);
  phase("norms of records");
  for (const GradientRows& rows : waiting_) take_norms(rows);
  form_factors(0);
  if (settings_.mode == Mode::two_pass) {
    SumSink sum(*this);
    batch.pass(all, sum);
  } else {
    add_sums();
  }
  batch_ = nullptr;
}

void Clipping::phase(std::string_view name) const {
  if (batch_ != nullptr && batch_->phase) batch_->phase(name);
}

void Clipping::check_coverage(std::size_t first) const {
  const std::int64_t examples = batch_->examples.count();
  for (std::size_t i = first; i < open_; ++i) {
    const bool table = is_table(shape_, i);
    const std::int64_t by_rows = table ? 0 : examples, by_lookup = table || is_tied(i) ? examples : 0;
    if (covered_[i].by_rows != by_rows || covered_[i].by_lookup != by_lookup)
      throw error(ExitCode::internal,
                  "parameter \"{}\" is not covered by one norm per example ({} of {} from products and sums, {} of {} "
                  "from lookups); its gradient would not be bounded",
                  specs_[i].name, covered_[i].by_rows, by_rows, covered_[i].by_lookup, by_lookup);
  }
}

double Clipping::part_clip() const { return settings_.clip / std::sqrt(static_cast<double>(parts_.count)); }

/// The row of the norms to which those of this parameter are added: that of its part, or the last one, which is not
/// counted, if another rank counts it.
std::size_t Clipping::row_of(std::size_t parameter) const {
  const bool counts = tensor_ == nullptr || tensor_->rank() == 0 || !specs_[parameter].cut.over.empty();
  return counts ? parts_.part[parameter] : parts_.count;
}

/// Squares of parts of gradients, in place.
void Clipping::add_over_ranks(Array<double> squares) {
  if (tensor_ == nullptr) return;
  phase("exchange");
  tensor_->sum(squares, "norms of records");
}

/// The sums over the ranks of the tensor axis, rows one behind the other.
Matrix<float> Clipping::over_ranks(Matrix<float> partial) {
  const Matrix<float> own{buffers_.partial.data, partial.rows, partial.columns, partial.columns};
  const std::int64_t size = own.rows * own.columns;
  kernels::copy_rows(execution_, view(partial), view(own));
  const Array<const float> all = tensor_->gather(Array<float>{own.data, size}, "gradients of records");
  kernels::sum_rows(execution_, {all.data, tensor_->size(), size, size}, {own.data, size});
  return own;
}

/// Of parameters [first, open_), which are whole parts. Then the clipped sums of their vectors.
void Clipping::form_factors(std::size_t first) {
  check_coverage(first);
  const std::int64_t examples = batch_->examples.count();
  const auto for_runs = [&](const auto& each) {
    for (const VectorRun& run : vector_runs_)
      if (run.parameter >= first && run.parameter < open_) each(run, vectors_of(run.parameter, run.sum.size));
  };
  for_runs([&](const VectorRun& run, const Matrix<float>& own) {
    kernels::add_stored_norms(execution_, view(is_partial(run.parameter) ? over_ranks(own) : own),
                              norms_of(run.parameter, 0, examples), buffers_.workspace);
  });
  // Those of examples that are not there have norm 0, and nothing to scale.
  const auto [least, most] = std::minmax_element(parts_.part.begin() + static_cast<std::ptrdiff_t>(first),
                                                 parts_.part.begin() + static_cast<std::ptrdiff_t>(open_));
  const auto begin = static_cast<std::int64_t>(*least) * shape_.examples.examples,
             size = static_cast<std::int64_t>(*most + 1) * shape_.examples.examples - begin;
  add_over_ranks({buffers_.norms.data + begin, size});
  phase("clipping factors");
  kernels::clip_factors(execution_, {buffers_.norms.data + begin, size}, part_clip(), settings_.clip_function,
                        summed_rows(), {buffers_.factors.data + begin, size});
  phase("clipped sums");
  for_runs([&](const VectorRun& run, const Matrix<float>& own) {
    kernels::add_clipped_examples(execution_, view(own), factors_of(run.parameter, 0, examples), run.sum);
  });
}

/// The backward pass has left the parameters from `first` on: their parts need not wait for the others.
void Clipping::close_from(std::size_t first) {
  if (!settings_.sums_by_part()) return;
  // Whole parts: none that a parameter before `first` belongs to.
  const auto begin = parts_.part.begin(), end = begin + static_cast<std::ptrdiff_t>(open_);
  auto from = begin + static_cast<std::ptrdiff_t>(std::min(first, open_));
  while (from != begin && from != end && *std::max_element(begin, from) >= *std::min_element(from, end)) ++from;
  if (from == end) return;
  first = static_cast<std::size_t>(from - begin);
  form_factors(first);
  const auto closed =
      std::stable_partition(summed_.begin(), summed_.end(), [&](const Later& later) { return later.first < first; });
  for (auto later = closed; later != summed_.end(); ++later) add_clipped(later->rows);
  summed_.erase(closed, summed_.end());
  kept_bytes_ = summed_.empty() ? 0 : summed_.back().kept_bytes;
  last_kept_ = {};
  open_ = first;
  sum_.complete_from(first);
}

// --- Norms ----------------------------------------------------------------------------------------------------------

/// Rows of the parameters that take their gradients together. Throws Error(internal) if gradients do not have as many
/// columns: part of a parameter would not be covered.
std::int64_t Clipping::held_by(const GradientRows& rows) const {
  std::int64_t held = 0;
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) held += specs_[i].rows();
  const ParameterSpec& spec = specs_[rows.parameter];
  const std::int64_t of_rows = rows.form == Form::lookup ? spec.columns() : held;
  const bool fits =
      rows.gradients.columns >= of_rows && (rows.form != Form::product || rows.inputs.columns == spec.columns());
  if (!fits || rows.examples.count() == 0)
    throw error(ExitCode::internal, "the rows of parameter \"{}\" are not those of whole examples and of all of it",
                spec.name);
  return held;
}

Array<double> Clipping::norms_of(std::size_t parameter, std::int64_t first, std::int64_t count) const {
  const auto row = static_cast<std::int64_t>(row_of(parameter));
  return {buffers_.norms.data + row * shape_.examples.examples + first, count};
}
Array<double> Clipping::norms_of(const GradientRows& rows) const {
  return norms_of(rows.parameter, rows.first_example, rows.examples.count());
}

Array<const float> Clipping::factors_of(std::size_t parameter, std::int64_t first, std::int64_t count) const {
  const auto part = static_cast<std::int64_t>(parts_.part[parameter]);
  return {buffers_.factors.data + part * shape_.examples.examples + first, count};
}

Matrix<float> Clipping::vectors_of(std::size_t parameter, std::int64_t columns) const {
  return {buffers_.vectors.data + begin_[parameter], batch_->examples.count(), columns,
          buffers_.vectors.size / shape_.examples.examples};
}

Matrix<kernels::bf16> Clipping::stored_of(std::size_t parameter, std::int64_t elements) const {
  return {buffers_.stored.data + begin_[parameter] * shape_.examples.examples, batch_->examples.count(), elements,
          elements};
}

void Clipping::take(const GradientRows& rows) {
  phase("norms of records");
  const bool waits = settings_.release == Release::end && (rows.form == Form::product || rows.form == Form::lookup);
  if (waits)
    waiting_.push_back(kept(rows));
  else
    take_norms(rows);
}

void Clipping::take_norms(const GradientRows& rows) {
  for (std::size_t i = rows.parameter; i < rows.parameter + rows.count; ++i) {
    if (i >= open_)
      throw error(ExitCode::internal,
                  "rows of parameter \"{}\" come after its factors have been formed; its gradient would not be bounded",
                  specs_[i].name);
    (rows.form == Form::lookup ? covered_[i].by_lookup : covered_[i].by_rows) += rows.examples.count();
  }
  if (rows.form == Form::product) return take_product(rows);
  if (rows.form == Form::lookup) return take_lookup(rows);
  take_vector(rows);
}

void Clipping::take_vector(const GradientRows& rows) {
  const std::int64_t columns = held_by(rows), examples = rows.examples.count();
  const Matrix<float> sums = vectors_of(rows.parameter, columns);
  const Matrix<float> of_call{sums.row(rows.first_example), examples, columns, sums.stride};
  if (rows.form == Form::column_sum)
    kernels::form_column_sums(execution_, rows.gradients.columns_from(0, columns), rows.examples, of_call);
  else
    kernels::form_column_products(execution_, rows.inputs, rows.gradients, rows.row_shift, rows.row_scale,
                                  rows.examples, of_call);
}

/// Output gradients of the parameters and, where the rows have them, the columns of zeros after them: products over
/// 50,257 columns take several times as long as those over 50,304.
AnyMatrix Clipping::formed(const GradientRows& rows) const {
  const std::int64_t held = held_by(rows), padded = padded_rows(specs_[rows.parameter], held);
  return rows.gradients.columns_from(0, rows.gradients.columns == padded ? padded : held);
}

void Clipping::take_product(const GradientRows& rows) {
  const AnyMatrix gradients = formed(rows);
  const std::int64_t out = gradients.columns, in = rows.inputs.columns;
  covered_[rows.parameter].formed_rows = out;
  if (settings_.mode == Mode::materialise) {
    if (rows.first_example == 0)
      summed_.push_back({true, rows.parameter, rows.parameter + rows.count, {}, kept_bytes_});
    const Matrix<kernels::bf16> stored = stored_of(rows.parameter, out * in);
    // Of a tied matrix the norm follows when the lookup has been added.
    return kernels::form_examples(execution_, rows.inputs, gradients, rows.examples,
                                  {stored.row(rows.first_example), rows.examples.count(), out * in, out * in},
                                  is_tied(rows.parameter) ? Array<double>{} : norms_of(rows), buffers_.workspace);
  }
  kernels::add_product_norms(execution_, rows.inputs, gradients, rows.examples,
                             method_of(settings_, in, held_by(rows), shape_), norms_of(rows), buffers_.workspace);
  if (is_tied(rows.parameter)) {
    const auto first = static_cast<std::size_t>(rows.first_example);
    const Examples lookup{.offsets = batch_->examples.offsets.subspan(first, rows.examples.offsets.size()),
                          .device_offsets = {batch_->examples.device_offsets.data + first,
                                             static_cast<std::int64_t>(rows.examples.offsets.size())}};
    kernels::add_tied_rows(execution_, rows.inputs, gradients, rows.examples, batch_->ids, first_row(rows), lookup,
                           {buffers_.tied_rows.data, buffers_.tied_rows.size / in, in, in}, buffers_.workspace);
  }
  sum_later(rows);
}

void Clipping::take_lookup(const GradientRows& rows) {
  const std::int64_t table_rows = held_by(rows), columns = rows.gradients.columns;
  if (is_tied(rows.parameter) && settings_.mode == Mode::materialise) {
    const Matrix<kernels::bf16> stored = stored_of(rows.parameter, covered_[rows.parameter].formed_rows * columns);
    // Ids of other ranks are not those of the rows of zeros.
    const Matrix<kernels::bf16> table{stored.data, stored.rows, table_rows * columns, stored.stride};
    kernels::add_lookup_to_examples(execution_, rows.ids, rows.gradients, first_row(rows), rows.examples, table,
                                    buffers_.workspace);
    return kernels::add_stored_norms(execution_, view(stored), norms_of(rows), buffers_.workspace);
  }
  kernels::add_lookup_norms(execution_, rows.ids, rows.gradients, first_row(rows), table_rows, rows.examples,
                            norms_of(rows), buffers_.workspace);
  if (is_tied(rows.parameter))
    kernels::add_tied_norms(execution_, rows.gradients,
                            {buffers_.tied_rows.data, rows.gradients.rows, columns, columns}, rows.examples,
                            norms_of(rows), buffers_.workspace);
  sum_later(rows);
}

AnyMatrix Clipping::keep(const AnyMatrix& rows) {
  const std::int64_t bytes = rows.rows * rows.columns * kernels::bytes_of(rows.type);
  if (kept_bytes_ + bytes > buffers_.kept.size)
    throw error(ExitCode::internal, "{} bytes of kept rows do not fit the planned {}", kept_bytes_ + bytes,
                buffers_.kept.size);
  const AnyMatrix copy{buffers_.kept.data + kept_bytes_, rows.type, rows.rows, rows.columns, rows.columns};
  kernels::copy_rows(execution_, rows, copy);
  kept_bytes_ = std::min(kept_bytes_ + aligned(bytes), buffers_.kept.size);
  return copy;
}

/// With copies of the rows that the backward pass writes over.
GradientRows Clipping::kept(GradientRows rows) {
  if (rows.form == Form::product) {
    if (!rows.gradients_stay) rows.gradients = keep(formed(rows));
    if (!rows.inputs_stay) rows.inputs = keep(rows.inputs);
    return rows;
  }
  if (rows.gradients_stay) return rows;
  // Tokens and positions have the same gradients.
  if (last_kept_.from != rows.gradients.data) last_kept_ = {rows.gradients.data, keep(rows.gradients)};
  rows.gradients = last_kept_.copy;
  return rows;
}

void Clipping::sum_later(const GradientRows& rows) {
  if (settings_.mode == Mode::two_pass) return;
  const GradientRows copied = settings_.release == Release::end ? rows : kept(rows);
  summed_.push_back({false, rows.parameter, rows.parameter + rows.count, copied, kept_bytes_});
}

// --- Clipped sums ---------------------------------------------------------------------------------------------------

void Clipping::add_clipped(const GradientRows& rows) {
  const std::int64_t columns = specs_[rows.parameter].columns();
  const Array<const float> factors = factors_of(rows.parameter, rows.first_example, rows.examples.count());
  float* const sum = sum_.held(rows.parameter).data;  // followed by the rows of zeros after the parameter
  if (rows.form == Form::product) {
    const AnyMatrix gradients = formed(rows);
    kernels::add_clipped_product(execution_, rows.inputs, gradients, rows.examples, factors,
                                 {sum, gradients.columns, columns, columns}, buffers_.workspace, settings_.products);
  } else {
    kernels::add_clipped_lookup(execution_, rows.ids, rows.gradients, first_row(rows), rows.examples, factors,
                                {sum, held_by(rows), columns, columns}, buffers_.workspace);
  }
}

/// In the order of the backward pass: the last parameters are complete first.
void Clipping::add_sums() {
  std::vector<std::size_t> open(summed_.size() + 1);  // parameters below still get rows from summed_[k] on
  for (std::size_t k = summed_.size(); k-- > 0;) open[k] = std::max(open[k + 1], summed_[k].end);
  for (std::size_t k = 0; k < summed_.size(); ++k) {
    const Later& later = summed_[k];
    phase("clipped sums");
    later.is_stored ? add_stored(later.first) : add_clipped(later.rows);
    sum_.complete_from(open[k + 1]);
  }
}

void Clipping::add_stored(std::size_t parameter) {
  const std::int64_t elements = covered_[parameter].formed_rows * specs_[parameter].columns();
  kernels::add_clipped_examples(execution_, view(stored_of(parameter, elements)),
                                factors_of(parameter, 0, batch_->examples.count()),
                                {sum_.held(parameter).data, elements});
}

/// Explicitly, one example after the other; the factors are formed on the host.
void Clipping::add_naive(const MicroBatch& batch) {
  const std::size_t size = parameters_.size();
  const auto gradient = [&](const training::AccumulatingSink& sink, std::size_t i) -> Matrix<float> {
    if (specs_[i].is_matrix()) return sink.held(i);
    const Array<float> vector = sink.vector(i);
    return {vector.data, 1, vector.size, vector.size};
  };
  std::vector<double> squares(size), parts(parts_.count);
  const Array<double> workspace{buffers_.totals.data + size, buffers_.totals.size - static_cast<std::int64_t>(size)};
  for (std::int64_t e = 0; e < batch.examples.count(); ++e) {
    one_->clear();
    batch.pass({e, e + 1}, *one_);
    if (const Array<float> partial = one_->partial_vectors(); tensor_ != nullptr && partial.size > 0)
      kernels::sum_rows(execution_,
                        {tensor_->gather(partial, "gradients").data, tensor_->size(), partial.size, partial.size},
                        partial);
    for (std::size_t i = 0; i < size; ++i) {
      const Matrix<float> of_one = gradient(*one_, i);
      const Array<double> rows{buffers_.squares.data, of_one.rows};
      device::zero(execution_, rows);
      kernels::add_row_norms(execution_, of_one, rows);
      kernels::total(execution_, rows, workspace, buffers_.totals.data + i);
      if (row_of(i) == parts_.count) device::zero(execution_, buffers_.totals.data + i, sizeof(double));
    }
    add_over_ranks({buffers_.totals.data, static_cast<std::int64_t>(size)});
    device::copy(execution_, squares.data(), buffers_.totals.data, 8 * static_cast<std::int64_t>(size),
                 device::Direction::to_host);
    kernels::fence(execution_);
    std::fill(parts.begin(), parts.end(), 0.0);
    for (std::size_t i = 0; i < size; ++i) parts[parts_.part[i]] += squares[i];
    for (std::size_t i = 0; i < size; ++i) {
      const float factor =
          kernels::clip_factor(parts[parts_.part[i]], part_clip(), settings_.clip_function, summed_rows());
      if (factor == 0) continue;  // also of a gradient that is not finite
      // Of a partial gradient, rank 0 has taken that of all ranks.
      if (is_partial(i) && tensor_->rank() > 0) continue;
      const Matrix<float> of_one = gradient(*one_, i), sum = gradient(sum_, i);
      kernels::scale_rows(execution_, view(of_one), factor);
      kernels::add_rows(execution_, view(sum), view(of_one), view(sum));
    }
  }
}

void Clipping::add_noise(const kernels::NoiseKey& key, std::uint64_t update, double noise_multiplier, double expected) {
  const double deviation = noise_multiplier * sensitivity();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_matrix = specs_[i].is_matrix();
    const training::RowParts& parts = parameters_.parts(i);
    const Array<float> vector = sum_.vector(i);
    const Matrix<float> owned = is_matrix ? sum_.matrix(i) : Matrix<float>{vector.data, 1, vector.size, vector.size};
    // Of a vector every rank has all elements, and takes the same noise.
    const std::int64_t first = is_matrix ? parts.owned.begin * owned.columns : parts.held.begin;
    kernels::add_noise(execution_, {owned.data, owned.rows * owned.columns}, deviation,
                       kernels::noise_stream(key, update, i), static_cast<std::uint64_t>(first), 1 / expected);
  }
}

}  // namespace weft::privacy

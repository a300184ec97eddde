// SPDX-License-Identifier: Apache-2.0
#include "model/data_parallel.hpp"

#include <algorithm>
#include <vector>

#include "kernels/language/residual/residual.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::model {
namespace {

/// A matrix that ranks update by rows.
bool is_exchanged(const ParameterSpec& spec) { return spec.is_matrix() && !spec.frozen; }

/// Elements that a rank receives at once of each rank, where the memory for exchanges is to be small. Larger parts are
/// as fast.
constexpr std::int64_t kReducedElements = std::int64_t{4} << 20;

/// Rows of its part that a rank receives at once of a gradient of `held` rows.
std::int64_t reduced_rows(std::int64_t held, std::int64_t columns, std::int64_t n_ranks, KeptGradients kept) {
  const std::int64_t part = parallel::largest_part(held, n_ranks);
  if (kept == KeptGradients::of_held_rows) return part;
  return std::min(part, std::max<std::int64_t>(1, kReducedElements / columns));
}

/// Bytes of fp32 that a rank receives at once at most: of a matrix rows from each rank, or the vectors of all.
std::int64_t received_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid, KeptGradients kept) {
  const std::int64_t n_ranks = grid.size(parallel::kDataAxis);
  std::int64_t part = 0;
  for (const ParameterSpec& spec : specs)
    if (is_exchanged(spec))
      part = std::max(part, reduced_rows(most_held_rows(spec, grid), spec.columns(), n_ranks, kept) * spec.columns());
  for (std::int64_t rank = 0; rank < grid.ranks(); ++rank)
    part = std::max(part, AccumulatingSink::vector_elements(specs, grid, rank));
  return 4 * n_ranks * part;
}

/// Bytes of the packed rows of gradients for all ranks; 0 if every matrix is sent at once.
std::int64_t packed_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape& grid, KeptGradients kept) {
  const std::int64_t n_ranks = grid.size(parallel::kDataAxis);
  std::int64_t bytes = 0;
  for (const ParameterSpec& spec : specs) {
    const std::int64_t held = most_held_rows(spec, grid), rows = reduced_rows(held, spec.columns(), n_ranks, kept);
    if (is_exchanged(spec) && rows < parallel::largest_part(held, n_ranks))
      bytes = std::max(bytes, 4 * n_ranks * rows * spec.columns());
  }
  return bytes;
}

/// The largest matrix, as weights or as gradients.
std::int64_t largest_exchange(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                              KeptGradients kept) {
  std::int64_t bytes = received_bytes(specs, grid, kept);
  for (const ParameterSpec& spec : specs)
    if (is_exchanged(spec)) bytes = std::max(bytes, 4 * most_held_rows(spec, grid) * spec.columns());
  return bytes;
}

}  // namespace

void gather_updated_rows(parallel::DeviceCommunicator& data_axis, const kernels::ParameterRows& matrix,
                         GatheredWeights gathered) {
  const std::int64_t planes = matrix.weight_rest != nullptr ? 2 : 1;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < data_axis.size(); ++r) {
    const std::int64_t owned = parallel::part(matrix.rows, data_axis.size(), r).size();
    bytes.push_back(weight_bytes(matrix.storage, owned, matrix.columns) / planes);
  }
  data_axis.all_gather(matrix.weight, bytes, "weights");
  if (planes > 1 && gathered == GatheredWeights::all) data_axis.all_gather(matrix.weight_rest, bytes, "weights");
}

DataParallel::Buffers::Buffers(std::span<const ParameterSpec> specs, const parallel::GridShape& grid,
                               std::int64_t gathered_bytes, StepArena& arena, KeptGradients kept) {
  const std::int64_t n_ranks = grid.size(parallel::kDataAxis);
  if (n_ranks == 1) return;
  arena.purpose("exchange of gradients");
  received = arena.exchange(parallel::kDataAxis, received_bytes(specs, grid, kept));
  packed = arena.take<std::byte>(packed_bytes(specs, grid, kept));
  largest_message = std::max(gathered_bytes, largest_exchange(specs, grid, kept));
  arena.communicator(n_ranks, largest_message);
}

DataParallel::DataParallel(const Parameters& parameters, AccumulatingSink& gradients, const parallel::Grid& grid,
                           const kernels::Execution& execution, Buffers&& buffers, bool overlap,
                           GatheredWeights gathered, const WeightSlots* slots)
    : parameters_(parameters),
      gradients_(gradients),
      execution_(execution),
      overlap_(overlap),
      gathered_(gathered),
      slots_(slots),
      buffers_(std::move(buffers)),
      complete_(parameters.size()),
      awaited_(parameters.size()) {
  if (grid.size(parallel::kDataAxis) == 1) return;
  if (overlap && device::is_asynchronous(execution)) {
    stream_.emplace(execution);
    arrived_.resize(parameters.size());
  }
  if (slots != nullptr) in_slot_.assign(slots->units().slots(), kNoUnit);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    unit_end_.resize(std::max(unit_end_.size(), parameters.specs()[i].unit + 1));
    unit_end_[parameters.specs()[i].unit] = i + 1;
  }
  ranks_.emplace(grid.axis(parallel::kDataAxis), communication(), buffers_.largest_message);
  host_ranks_ = &grid.axis(parallel::kDataAxis);
}

void DataParallel::begin_step() {
  idle_.restart();
  adds_ = reducing_ = false;
  changed_ = active();
  in_step_ = true;
}

void DataParallel::end_step() {
  changed_ = active();
  in_step_ = false;
}

/// Exchanges, which follow the work of the computation so far.
void DataParallel::begin() {
  if (stream_) {
    computed_.record(execution_);
    computed_.hold_back(communication());
  } else if (in_step_) {
    idle_.begin(execution_);
  }
}

void DataParallel::end() {
  if (!stream_ && in_step_) idle_.end(execution_);
}

/// Later work of the computation waits for an event of the exchanges.
void DataParallel::await(const device::Event& event) {
  if (!stream_) return;
  if (in_step_) idle_.begin(execution_);
  event.hold_back(execution_);
  if (in_step_) idle_.end(execution_);
}

void DataParallel::await_exchanges() {
  if (stream_) exchanged_.record(communication());
  await(exchanged_);
}

/// out = the sum of what the ranks have sent, `elements` each.
void DataParallel::add_up(std::int64_t elements, float* out) {
  kernels::sum_rows(communication(),
                    {reinterpret_cast<const float*>(buffers_.received.data()), ranks_->size(), elements, elements},
                    {out, elements});
}

void DataParallel::reduce_matrix(std::size_t parameter) {
  const kernels::Matrix<float> held = gradients_.held(parameter);
  const std::int64_t part = parallel::largest_part(held.rows, ranks_->size()),
                     rows = reduced_rows(held.rows, held.columns, ranks_->size(), gradients_.kept());
  for (std::int64_t first = 0; first < part; first += rows)
    reduce_rows(parameter, {first, std::min(part, first + rows)}, rows < part);
}

/// Reduces rows of the parts of all owners. packed: these do not follow one another in the gradient.
void DataParallel::reduce_rows(std::size_t parameter, parallel::Range rows, bool packed) {
  const kernels::Matrix<float> held = gradients_.held(parameter);
  kernels::Matrix<float> owned = gradients_.matrix(parameter);
  const std::int64_t row_bytes = 4 * held.columns;
  std::vector<std::int64_t> bytes;
  std::byte* to = buffers_.packed.data;
  for (std::int64_t rank = 0; rank < ranks_->size(); ++rank) {
    const parallel::Range part = parallel::part(held.rows, ranks_->size(), rank),
                          sent = parallel::intersection({part.begin + rows.begin, part.begin + rows.end}, part);
    bytes.push_back(row_bytes * sent.size());
    if (!packed) continue;
    device::copy(communication(), to, held.data + sent.begin * held.columns, bytes.back(),
                 device::Direction::on_device);
    to += bytes.back();
  }
  ranks_->send_to_owners(packed ? static_cast<const void*>(buffers_.packed.data) : held.data, bytes,
                         buffers_.received.data(), "gradients");
  rows = parallel::intersection(rows, {0, owned.rows});
  float* const sum = owned.data + rows.begin * owned.columns;
  const std::int64_t elements = rows.size() * owned.columns;
  if (!adds_) return add_up(elements, sum);
  float* const added = reinterpret_cast<float*>(buffers_.received.data());
  add_up(elements, added);
  const auto view = [&](float* data) {
    return kernels::AnyMatrix{data, kernels::Scalar::fp32, rows.size(), owned.columns, owned.columns};
  };
  kernels::add_rows(communication(), view(sum), view(added), view(sum));
}

void DataParallel::reduce_matrices(std::size_t first) {
  begin();
  while (complete_ > first)
    if (is_exchanged(parameters_.specs()[--complete_])) reduce_matrix(complete_);
  end();
}

void DataParallel::reduce_from(std::size_t first) {
  if (!active() || first >= complete_) return;
  if (!in_micro_batches()) {
    if (overlap_) reduce_matrices(first);
    return;
  }
  await_reductions();  // the next unit is formed where the last one was
  reduce_matrices(first);
  if (stream_) reduced_.record(communication());
  reducing_ = true;
  if (first > 0) return;
  complete_ = parameters_.size();
  adds_ = true;
}

void DataParallel::await_reductions() {
  if (!reducing_) return;
  reducing_ = false;
  await(reduced_);
}

void DataParallel::reduce() {
  if (!active()) return;
  if (!in_micro_batches()) {
    reduce_matrices(0);
    complete_ = parameters_.size();
  }
  begin();
  const kernels::Array<float> vectors = gradients_.vectors();
  if (vectors.size > 0) {  // none if all are frozen
    const std::vector<std::int64_t> bytes(static_cast<std::size_t>(ranks_->size()), 4 * vectors.size);
    ranks_->all_gather(vectors.data, buffers_.received.data(), bytes, "gradients");
    add_up(vectors.size, vectors.data);
  }
  end();
  await_exchanges();
  gradients_.clear_gaps();
}

void DataParallel::start_weights() {
  if (!changed_) return;
  changed_ = false;
  if (slots_ != nullptr) {
    std::fill(in_slot_.begin(), in_slot_.end(), kNoUnit);
    return;
  }
  begin();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_exchanged(parameters_.specs()[i])) gather_updated_rows(*ranks_, parameters_.matrix(i), gathered_);
    if (stream_) arrived_[i].record(communication());
  }
  end();
  awaited_ = 0;
}

void DataParallel::use_weights(std::size_t unit, std::size_t next) {
  if (!active()) return;
  if (slots_ == nullptr) return await_weights_below(unit_end_[unit]);
  gather_unit(unit);
  if (stream_) await(arrived_[slots_->units().slot_of(unit)]);
  if (next != kNoUnit) gather_unit(next);
}

void DataParallel::await_weights() {
  if (active() && slots_ == nullptr) await_weights_below(parameters_.size());
}

void DataParallel::gather_unit(std::size_t unit) {
  const std::size_t slot = slots_->units().slot_of(unit);
  if (in_slot_[slot] == unit) return;
  in_slot_[slot] = unit;
  begin();  // what was in the slot has been read
  for (std::size_t i = unit == 0 ? 0 : unit_end_[unit - 1]; i < unit_end_[unit]; ++i)
    if (parameters_.specs()[i].is_matrix()) gather_matrix(i);
  if (stream_) arrived_[slot].record(communication());
  end();
}

void DataParallel::gather_matrix(std::size_t parameter) {
  const std::int64_t held = parameters_.matrix(parameter).rows;
  for (const Parameters::Gathered& plane : parameters_.gathered(parameter)) {
    std::vector<std::int64_t> bytes;
    for (std::int64_t r = 0; r < ranks_->size(); ++r)
      bytes.push_back(plane.row_bytes * parallel::part(held, ranks_->size(), r).size());
    ranks_->all_gather(plane.owned, plane.held, bytes, "weights");
    // Another unit may have written over the rows of zeros.
    if (const std::int64_t rows = parameters_.rows_in_memory(parameter); rows > held)
      device::zero(communication(), plane.held + held * plane.row_bytes, (rows - held) * plane.row_bytes);
  }
}

void DataParallel::await_weights_below(std::size_t end) {
  if (end <= awaited_) return;
  awaited_ = end;
  if (stream_) await(arrived_[end - 1]);
}

void DataParallel::all_gather(void* all, std::span<const std::int64_t> bytes, const char* name) {
  begin();
  ranks_->all_gather(all, bytes, name);
  end();
  await_exchanges();
}

std::int64_t DataParallel::most(std::int64_t value) const {
  if (active()) host_ranks_->maximum({&value, 1});
  return value;
}

void DataParallel::sum(kernels::Array<double> values, const char* name) {
  begin();
  ranks_->sum(values, name);
  end();
  await_exchanges();
}

void DataParallel::maximum(kernels::Array<std::int32_t> values, const char* name) {
  begin();
  ranks_->maximum(values, name);
  end();
  await_exchanges();
}

}  // namespace weft::model

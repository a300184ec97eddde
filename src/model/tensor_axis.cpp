// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_axis.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::model {
namespace {

/// Largest contribution of a rank that the others receive whole: one exchange, of more bytes, takes less time than two.
constexpr std::int64_t kFewBytes = parallel::Peers::Channel::kMostRows;

std::optional<device::Stream> exchange_stream(const kernels::Execution& computation, bool overlap) {
  if (!overlap || !device::is_asynchronous(computation)) return std::nullopt;
  return std::optional<device::Stream>(std::in_place, computation);
}

}  // namespace

TensorAxis::Buffers::Buffers(const parallel::GridShape& grid, kernels::Scalar type, std::int64_t rows,
                             std::int64_t columns, std::int64_t gathered, StepArena& arena) {
  const std::int64_t n_ranks = grid.size(parallel::kTensorAxis);
  if (n_ranks == 1) return;
  arena.purpose("exchange of activations");
  const std::int64_t row_bytes = columns * kernels::bytes_of(type);
  largest_message = n_ranks * std::max(parallel::largest_part(rows, n_ranks) * row_bytes, gathered);
  received = arena.exchange(parallel::kTensorAxis, largest_message);
  arena.communicator(n_ranks, largest_message);
}

TensorAxis::TensorAxis(const parallel::Grid& grid, const kernels::Execution& execution, Buffers&& buffers, bool overlap)
    : execution_(execution),
      stream_(exchange_stream(execution, overlap)),
      buffers_(std::move(buffers)),
      ranks_(grid.axis(parallel::kTensorAxis), communication(), buffers_.largest_message) {}

void TensorAxis::mark(device::IdleClock* idle) {
  idle_ = idle;
  if (!stream_) ranks_.mark(idle);
}

/// Exchanges, which follow the work of the computation so far.
void TensorAxis::begin() {
  if (!stream_) return;
  computed_.record(execution_);
  computed_.hold_back(communication());
}

/// Later work of the computation waits for an event of the exchanges.
void TensorAxis::await(const device::Event& event) {
  if (!stream_) return;
  if (idle_ != nullptr) idle_->begin(execution_);
  event.hold_back(execution_);
  if (idle_ != nullptr) idle_->end(execution_);
}

/// Later work of the computation waits for all exchanges so far.
void TensorAxis::end() {
  if (stream_) exchanged_.record(communication());
  await(exchanged_);
}

void TensorAxis::start_sum(kernels::AnyMatrix rows, const char* name) {
  const auto free = std::find_if(sums_.begin(), sums_.end(), [](const Sum& each) { return each.rows.data == nullptr; });
  if (free == sums_.end())
    throw error(ExitCode::internal, "exchange of {}: {} sums are already under way", name, sums_.size());
  free->rows = rows;
  free->name = name;
  if (!stream_) return;
  begin();
  exchange(rows, name);
  free->arrived.record(communication());
}

void TensorAxis::await(kernels::AnyMatrix rows) {
  const auto sum =
      std::find_if(sums_.begin(), sums_.end(), [&](const Sum& each) { return each.rows.data == rows.data; });
  if (sum == sums_.end()) return;
  if (stream_)
    await(sum->arrived);
  else
    exchange(sum->rows, sum->name);
  sum->rows = {};
}

void TensorAxis::exchange(kernels::AnyMatrix rows, const char* name) {
  const std::int64_t row_bytes = rows.columns * kernels::bytes_of(rows.type), all_bytes = rows.rows * row_bytes;
  if (all_bytes <= kFewBytes && size() * all_bytes <= buffers_.largest_message)
    return ranks_.sum_rows(rows, buffers_.received.data(), name);
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < size(); ++r) bytes.push_back(row_bytes * parallel::part(rows.rows, size(), r).size());
  ranks_.send_to_owners(rows.data, bytes, buffers_.received.data(), name);
  const parallel::Range own = parallel::part(rows.rows, size(), rank());
  const kernels::AnyMatrix parts{buffers_.received.data(), rows.type, size() * own.size(), rows.columns, rows.columns};
  kernels::sum_parts(communication(), parts, size(), rows.rows_from(own.begin, own.size()));
  ranks_.all_gather(rows.data, bytes, buffers_.received, name);
}

void TensorAxis::sum(kernels::Array<double> values, const char* name) {
  if (values.size <= parallel::DeviceCommunicator::kMostValues) {
    begin();
    ranks_.sum(values, name);
    return end();
  }
  const kernels::Array<const double> all = gather(values, name);
  device::zero(execution_, values);
  for (int r = 0; r < size(); ++r) kernels::accumulate(execution_, {all.data + r * values.size, values.size}, values);
}

const std::byte* TensorAxis::gather(const void* own, std::int64_t bytes, const char* name) {
  const std::vector<std::int64_t> of_rank(static_cast<std::size_t>(size()), bytes);
  begin();
  ranks_.all_gather(own, buffers_.received.data(), of_rank, name);
  end();
  return buffers_.received.data();
}

}  // namespace weft::model

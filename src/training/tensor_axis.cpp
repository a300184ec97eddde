// SPDX-License-Identifier: Apache-2.0
#include "training/tensor_axis.hpp"

#include <algorithm>
#include <vector>

#include "kernels/reduce/reduce.hpp"

namespace weft::training {

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

TensorAxis::TensorAxis(const parallel::Grid& grid, const kernels::Execution& execution, Buffers&& buffers)
    : execution_(execution),
      buffers_(std::move(buffers)),
      ranks_(grid.axis(parallel::kTensorAxis), execution, buffers_.largest_message) {}

void TensorAxis::sum(kernels::AnyMatrix rows, const char* name) {
  const std::int64_t row_bytes = rows.columns * kernels::bytes_of(rows.type);
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < size(); ++r) bytes.push_back(row_bytes * parallel::part(rows.rows, size(), r).size());
  ranks_.send_to_owners(rows.data, bytes, buffers_.received.data(), name);
  const parallel::Range own = parallel::part(rows.rows, size(), rank());
  const kernels::AnyMatrix parts{buffers_.received.data(), rows.type, size() * own.size(), rows.columns, rows.columns};
  kernels::sum_parts(execution_, parts, size(), rows.rows_from(own.begin, own.size()));
  ranks_.all_gather(rows.data, bytes, buffers_.received, name);
}

void TensorAxis::sum(kernels::Array<double> values, const char* name) {
  if (values.size <= parallel::DeviceCommunicator::kMostValues) return ranks_.sum(values, name);
  const kernels::Array<const double> all = gather(values, name);
  device::zero(execution_, values);
  for (int r = 0; r < size(); ++r) kernels::accumulate(execution_, {all.data + r * values.size, values.size}, values);
}

const std::byte* TensorAxis::gather(const void* own, std::int64_t bytes, const char* name) {
  const std::vector<std::int64_t> of_rank(static_cast<std::size_t>(size()), bytes);
  ranks_.all_gather(own, buffers_.received.data(), of_rank, name);
  return buffers_.received.data();
}

}  // namespace weft::training

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/row_exchange.hpp"

#include <numeric>

namespace weft::transcoder {
namespace {

std::vector<std::int64_t> times(std::span<const std::int64_t> rows, std::int64_t row_bytes) {
  std::vector<std::int64_t> bytes;
  for (const std::int64_t n : rows) bytes.push_back(n * row_bytes);
  return bytes;
}

std::int64_t total(std::span<const std::int64_t> rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

}  // namespace

std::int64_t RowExchange::bytes(const ExchangeManner& manner, std::int64_t layer_bytes, std::int64_t sent_rows,
                                std::int64_t received_rows) {
  return manner.together ? 0 : (sent_rows + received_rows) * layer_bytes;
}

RowExchange::RowExchange(parallel::DeviceCommunicator& ranks, const ExchangeManner& manner,
                         const kernels::Execution& execution, std::int64_t n_layers, std::int64_t layer_bytes,
                         std::int64_t sent_rows, std::int64_t received_rows)
    : ranks_(ranks),
      execution_(execution),
      together_(manner.together || ranks.size() == 1),
      n_layers_(n_layers),
      layer_bytes_(layer_bytes),
      packed_(together_ ? 0 : sent_rows * layer_bytes, manner),
      arrived_(together_ ? 0 : received_rows * layer_bytes, manner) {}

void RowExchange::all_to_all(const void* send, std::span<const std::int64_t> send_rows, void* receive,
                             std::span<const std::int64_t> receive_rows, const char* name) {
  const std::int64_t row = n_layers_ * layer_bytes_;
  if (together_) return ranks_.all_to_all(send, times(send_rows, row), receive, times(receive_rows, row), name);
  const auto send_bytes = times(send_rows, layer_bytes_), receive_bytes = times(receive_rows, layer_bytes_);
  for (std::int64_t layer = 0; layer < n_layers_; ++layer) {
    const std::int64_t at = layer * layer_bytes_;
    device::copy_rows(execution_, packed_.open(), layer_bytes_, static_cast<const std::byte*>(send) + at, row,
                      layer_bytes_, total(send_rows));
    ranks_.all_to_all(packed_.data(), send_bytes, arrived_.open(), receive_bytes, name);
    device::copy_rows(execution_, static_cast<std::byte*>(receive) + at, row, arrived_.data(), layer_bytes_,
                      layer_bytes_, total(receive_rows));
    packed_.close();
    arrived_.close();
  }
}

void RowExchange::all_gather(void* rows, std::span<const std::int64_t> rows_of_rank, const char* name) {
  const std::int64_t row = n_layers_ * layer_bytes_;
  if (together_) return ranks_.all_gather(rows, times(rows_of_rank, row), name);
  const auto own = static_cast<std::size_t>(ranks_.rank());
  const std::int64_t begin = total(rows_of_rank.first(own)), n = total(rows_of_rank);
  const auto bytes = times(rows_of_rank, layer_bytes_);
  for (std::int64_t layer = 0; layer < n_layers_; ++layer) {
    std::byte* const block = static_cast<std::byte*>(rows) + layer * layer_bytes_;
    device::copy_rows(execution_, arrived_.open() + begin * layer_bytes_, layer_bytes_, block + begin * row, row,
                      layer_bytes_, rows_of_rank[own]);
    ranks_.all_gather(arrived_.data(), bytes, name);
    device::copy_rows(execution_, block, row, arrived_.data(), layer_bytes_, layer_bytes_, n);
    arrived_.close();
  }
}

}  // namespace weft::transcoder

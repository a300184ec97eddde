// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/stored_order.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "dataset/activations/reader.hpp"
#include "device/memory.hpp"

namespace weft::dataset {

struct StoredOrder::State {
  Description description;
  std::int64_t batch_tokens;
  const parallel::Grid& grid;
  Reader reader;
  device::HostBuffer<std::byte> inputs, targets;
  RawBatch batch;
};

StoredOrder::StoredOrder(const Description& description, std::int64_t batch_tokens, const parallel::Grid& grid,
                         int n_threads)
    : state_(new State{description, batch_tokens, grid, Reader(description, n_threads), {}, {}, {}}) {
  const std::int64_t largest = std::min(batch_tokens, description.n_rows);
  const std::int64_t own = grid.shape().largest_part(largest);
  state_->inputs = device::HostBuffer<std::byte>(own * description.row_bytes());
  state_->targets = device::HostBuffer<std::byte>(own * description.row_bytes());
}

StoredOrder::~StoredOrder() = default;

std::int64_t StoredOrder::n_batches() const {
  return (state_->description.n_rows + state_->batch_tokens - 1) / state_->batch_tokens;
}

const RawBatch& StoredOrder::read(std::int64_t i) {
  State& state = *state_;
  const Description& description = state.description;
  const std::int64_t row_bytes = description.row_bytes(), columns = description.n_layers * description.d_model;
  const std::int64_t begin = i * state.batch_tokens, n = std::min(state.batch_tokens, description.n_rows - begin);
  const parallel::Range own = state.grid.own_part(n);

  std::vector<RowRead> reads;
  std::int64_t first_of_file = 0;
  for (std::size_t file = 0; file < description.files.size(); ++file) {
    const std::int64_t rows = description.files[file].rows;
    const std::int64_t from = std::max(begin + own.begin, first_of_file),
                       to = std::min(begin + own.end, first_of_file + rows);
    if (from < to) {
      const std::int64_t at = (from - begin - own.begin) * row_bytes;
      reads.push_back({static_cast<std::int64_t>(file), from - first_of_file, to - from, state.inputs.data() + at,
                       state.targets.data() + at});
    }
    first_of_file += rows;
  }
  const auto own_failure = parallel::attempt([&] {
    state.reader.read(reads);
    for (const RowRead& rows : reads)
      if (const std::string bad = non_finite_text(description, rows); !bad.empty())
        throw error(ExitCode::data, "{}; remove the row or regenerate the activations", bad);
  });
  // The lowest row of the batch: the message does not depend on the number of ranks.
  if (const auto failure = parallel::first_failure(state.grid.world(), own_failure, begin + own.begin))
    failure->raise();
  state.batch.inputs = {state.inputs.data(), description.dtype, own.size(), columns, columns};
  state.batch.targets = {state.targets.data(), description.dtype, own.size(), columns, columns};
  if (description.targets_are_inputs) state.batch.targets = state.batch.inputs;
  state.batch.n_tokens = n;
  state.batch.begin = {0, begin};
  state.batch.end = {0, begin + n};
  return state.batch;
}

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/sparse_rows.hpp"

#include "base/trace.hpp"
#include "dataset/activations/stored_order.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "run/pass.hpp"

namespace weft::transcoder {
namespace {

template <class T>
void to_host(const kernels::Execution& execution, const T* from, std::int64_t n, std::vector<T>& to) {
  to.resize(static_cast<std::size_t>(n));
  device::copy(execution, to.data(), from, n * static_cast<std::int64_t>(sizeof(T)), device::Direction::to_host);
}

}  // namespace

void for_each_batch(const dataset::Description& description, Forward& forward, const parallel::Grid& grid,
                    const kernels::Execution& execution, std::int64_t batch_tokens,
                    const std::function<void(const SparseRows&)>& consume) {
  dataset::StoredOrder stored(description, batch_tokens, grid, 1);
  SparseRows rows;
  run::Pass pass("encoding the data", stored.n_batches(), "batches");
  for (std::int64_t i = 0; i < stored.n_batches(); ++i) {
    trace::next_step();
    const dataset::RawBatch& batch = stored.read(i);
    forward.load(batch);
    forward.encode();
    const kernels::SparseActivations& activations = forward.activations();
    to_host(execution, activations.row_offsets.data, activations.n_tokens + 1, rows.offsets);
    kernels::fence(execution);  // wait for the number of entries
    to_host(execution, activations.key.data, rows.offsets.back(), rows.key);
    to_host(execution, activations.value.data, rows.offsets.back(), rows.value);
    kernels::fence(execution);  // the next batch overwrites this one
    rows.first_row = batch.begin.position;
    rows.n_tokens = activations.n_tokens;
    consume(rows);
    pass.done(i + 1);
  }
  trace::end_steps();
  forward.require_valid_selections("of the encoding");
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Batches for evaluation: batch_tokens consecutive rows in stored order, each row once. The last batch may be shorter.
#pragma once

#include <memory>

#include "dataset/activations/loader.hpp"

namespace weft::dataset {

class StoredOrder {
 public:
  StoredOrder(const Description&, std::int64_t batch_tokens, const parallel::Grid&, int n_threads);
  ~StoredOrder();

  std::int64_t n_batches() const;
  /// Batch i of n_batches(), valid until the next call. Throws Error(data), known to all ranks, with file, dataset, row
  /// and column of a value that is not finite. Collective over all ranks.
  const RawBatch& read(std::int64_t i);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::dataset

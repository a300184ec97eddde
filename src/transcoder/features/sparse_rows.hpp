// SPDX-License-Identifier: Apache-2.0
//
// The sparse activations of a dataset on the host, batch by batch in stored order: for programs that read activations
// instead of reconstructions.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dataset/activations/description.hpp"
#include "transcoder/forward/forward.hpp"

namespace weft::transcoder {

/// Activations of the tokens of a batch over the features of this rank (CSR). Keys of a token ascend; values are > 0.
struct SparseRows {
  std::int64_t first_row = 0;  ///< row of the dataset, in stored order
  std::int64_t n_tokens = 0;
  std::vector<std::int64_t> offsets;  ///< [n_tokens + 1]
  std::vector<std::uint32_t> key;     ///< layer * local features + local feature
  std::vector<float> value;
};

/// Encodes batches of `batch_tokens` rows with the training activation, as `evaluate` does, and hands each over. The
/// grid has one rank on the data axis, so that each rank gets all tokens. `forward` was constructed for batches of at
/// least `batch_tokens`. Collective. Throws a collective Error(data) with file, row, layer and column of a
/// value that is not finite; Error(internal) after the last batch if a selection was not valid.
void for_each_batch(const dataset::Description&, Forward&, const parallel::Grid&, const kernels::Execution&,
                    std::int64_t batch_tokens, const std::function<void(const SparseRows&)>& consume);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Batches that lie in memory, for `weft benchmark`: a step is timed without files and without a loader.
//
// Rows are planted as those of dataset/activations/synthetic.hpp, but drawn with replacement: 16 directions per token
// and layer, popular ones (rank + 1)^-zipf often, and a little noise; so that after some steps of training the learned
// features differ in popularity as those of a language model do. A row depends on the seed and its index alone: the
// same on any grid.
#pragma once

#include <vector>

#include "dataset/activations/loader.hpp"
#include "dataset/activations/statistics.hpp"
#include "device/memory.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::bench {

/// The batches of a case.
class BatchesOfCase {
 public:
  virtual ~BatchesOfCase() = default;
  virtual const dataset::RawBatch& next() = 0;
  virtual void release() {}                                   ///< the batch
  virtual const dataset::Statistics& statistics() const = 0;  ///< the same on every rank
  virtual dataset::Normalisation normalisation() const = 0;
  virtual std::int64_t row_bytes()
      const = 0;  ///< bytes of a row of inputs (or targets) that is not in device memory; 0: all are
  virtual transcoder::Shape shape(const transcoder::ModelSettings&) const = 0;
};

class ResidentBatches final : public BatchesOfCase {
 public:
  /// This rank's rows of `n_batches` batches of `n_tokens` (over all ranks): fp32 on the host, bf16 on a GPU. Made by
  /// `n_threads` threads.
  ResidentBatches(const transcoder::Shape&, std::int64_t n_tokens, std::int64_t n_batches, double zipf,
                  std::uint64_t seed, const parallel::Grid&, const kernels::Execution&, int n_threads);

  /// The batches in turn, again and again.
  const dataset::RawBatch& next() override { return batches_[next_++ % batches_.size()]; }
  /// Statistics of a sample of the rows.
  const dataset::Statistics& statistics() const override { return statistics_; }
  dataset::Normalisation normalisation() const override;
  std::int64_t row_bytes() const override { return 0; }
  transcoder::Shape shape(const transcoder::ModelSettings& settings) const override {
    return transcoder::shape_of(settings, n_layers_, d_model_);
  }

 private:
  std::vector<device::Buffer<std::byte>> memory_;
  std::vector<dataset::RawBatch> batches_;
  std::size_t next_ = 0;
  std::int64_t n_layers_, d_model_;
  dataset::Statistics statistics_;
};

}  // namespace weft::bench

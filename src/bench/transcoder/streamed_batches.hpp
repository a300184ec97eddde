// SPDX-License-Identifier: Apache-2.0
//
// Batches of data that is read or computed while steps run (benchmark.from = "data"): those of weft train.
#pragma once

#include <memory>

#include "bench/transcoder/resident_batches.hpp"
#include "dataset/activations/description.hpp"
#include "parallel/world.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::bench {

/// Training data, and in derived classes what computes its rows.
struct TrainingData {
  virtual ~TrainingData() = default;
  dataset::Description description;
};

class StreamedBatches final : public BatchesOfCase {
 public:
  /// Reads the data once, for statistics. Collective.
  StreamedBatches(std::unique_ptr<TrainingData>, const transcoder::Configuration&, const parallel::World&,
                  const parallel::Grid&, int n_threads);

  const dataset::RawBatch& next() override { return loader_.next(); }
  void release() override { loader_.release(); }
  const dataset::Statistics& statistics() const override { return statistics_; }
  dataset::Normalisation normalisation() const override { return normalisation_; }
  std::int64_t row_bytes() const override { return data_->description.row_bytes(); }
  transcoder::Shape shape(const transcoder::ModelSettings& settings) const override {
    return transcoder::shape_of(settings, data_->description.n_layers, data_->description.d_model);
  }

 private:
  const std::unique_ptr<TrainingData> data_;
  const dataset::Statistics statistics_;
  const dataset::Normalisation normalisation_;
  dataset::Loader loader_;
};

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/streamed_batches.hpp"

namespace weft::bench {

StreamedBatches::StreamedBatches(std::unique_ptr<TrainingData> data, const transcoder::Configuration& configuration,
                                 const parallel::World& world, const parallel::Grid& grid, int n_threads)
    : data_(std::move(data)),
      statistics_(
          dataset::compute_statistics(world, data_->description, n_threads, configuration.data.statistics_rows)),
      normalisation_(dataset::normalisation(statistics_, data_->description, configuration.data.normalise)),
      loader_(data_->description, configuration.data, static_cast<std::uint64_t>(configuration.run.seed), world,
              world.node(), grid, {}, n_threads) {}

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/baselines.hpp"

#include <algorithm>

#include "bench/fresh_memory.hpp"
#include "bench/transcoder/selection_on_rank_0.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"
#include "transcoder/selection/drivers.hpp"

namespace weft::bench {
namespace {

class WaitAfterExchange final : public parallel::ExchangeObserver {
 public:
  void before(const kernels::Execution&, const parallel::Communicator&) const override {}
  void after(const kernels::Execution& execution) const override { kernels::fence(execution); }
  bool isolates() const override { return false; }
};

/// The drivers, with one sum over the ranks per histogram.
class SelectionInPieces final : public transcoder::SelectorFactory {
 public:
  void take(const transcoder::SelectionSpec& spec, transcoder::SelectionBuffers& buffers,
            model::StepArena& arena) const override {
    transcoder::take_driver_buffers(spec, buffers, arena);
  }
  std::unique_ptr<transcoder::Selector> make(const transcoder::SelectionSpec& spec,
                                             const transcoder::SelectionBuffers& buffers, const parallel::Grid& grid,
                                             const kernels::Execution& execution) const override {
    return transcoder::make_driver(spec, buffers, grid, execution, [](transcoder::SumOverRanks sum) {
      return [sum = std::move(sum)](kernels::Array<std::int64_t> values) {
        for (std::int64_t begin = 0; begin < values.size; begin += kernels::kHistogramBins)
          sum({values.data + begin, std::min<std::int64_t>(values.size - begin, kernels::kHistogramBins)});
      };
    });
  }
};

}  // namespace

transcoder::Configuration with_baselines(transcoder::Configuration configuration, const TranscoderSettings& settings) {
  static const WaitAfterExchange wait;
  static const FreshMemory fresh;
  static const SelectionOnRankZero rank_0;
  static const SelectionInPieces pieces;
  parallel::ExchangeStrategy& exchange = configuration.parallel.exchange;
  exchange.direct = settings.direct;
  if (settings.wait) exchange.observer = &wait;
  if (!settings.keep_buffers) exchange.memory = &fresh;
  if (!settings.together) configuration.alternatives = {&pieces, true};
  if (settings.selection == SelectionPlace::rank_0) configuration.alternatives.selector = &rank_0;
  configuration.data.prefetch = settings.prefetch;
  return configuration;
}

}  // namespace weft::bench

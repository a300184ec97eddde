// SPDX-License-Identifier: Apache-2.0
//
// Selects the active features of a batch: exact, over all ranks, from pre-activations that are never stored whole.
//
// The rule is in kernels/transcoder/select/selection_rule.hpp. Rule and result do not depend on ranks: for given
// products the set and its values have the same bits on every grid.
//
// One interface, `Selector`, with two drivers, chosen at construction (drivers.hpp):
//
//   host_selector.cpp     portable kernels; the host controls the passes, ranks communicate by MPI
//   device_selector.cpp   hand-written CUDA kernels; all work is on the GPU, so that a step can be captured as a graph
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/stream.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "parallel/grid.hpp"
#include "parallel/traffic.hpp"
#include "transcoder/selection/selection_sizes.hpp"

namespace weft::transcoder {

class Selector {
 public:
  /// Fills `product` [token_count, feature_count] on the stream of the given execution. Must give the same bits when
  /// called again for the same tile.
  using Producer =
      std::function<void(const kernels::Execution&, const kernels::TileRange&, kernels::AnyMatrix product)>;

  /// Filter thresholds for the next batch, one key per group (batch_topk; else empty). They are part of a checkpoint,
  /// so that a resumed run also takes the same time. Any content gives the same result.
  struct ControllerState {
    kernels::Array<std::uint32_t> keys;
    bool on_device = false;
  };

  virtual ~Selector() = default;
  Selector(const Selector&) = delete;
  Selector& operator=(const Selector&) = delete;

  /// Sets the k that later selections use in place of settings.k, which it must not exceed (batch_topk, topk).
  void keep(double k) { k_ = k; }
  /// Selects the active features of a batch. Collective over the grid. n_tokens_total: tokens of this batch over all
  /// ranks, at most max_tokens; this rank has grid.part(parallel::kDataAxis, n_tokens_total). bias_of_layer: L arrays
  /// of this rank's features, on the device. bounds_of_layer, with thresholds only: L arrays of the values that
  /// features must exceed (kernels::jump_bound). operands: the operands of the producer's products; a driver that forms
  /// the products itself does not call the producer.
  void select(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer, const Producer&,
              std::span<const kernels::Array<const float>> bounds_of_layer = {},
              const kernels::EncoderOperands* operands = nullptr);

  /// Replace `select` with SelectionSpec::follows (topk only): call follow; then `take` for every tile of another
  /// selector of the same sizes, grid and batch, as it produces them (whole passes over the tiles or parts of passes,
  /// each from the first tile on; the last one whole); then `finish`. The biases must remain valid until then.
  void follow(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer);
  virtual void take(const kernels::Execution&, const kernels::TileRange&, kernels::AnyMatrix product);
  virtual void finish();

  /// The result of `select` or `finish`, until the next one.
  const kernels::SparseActivations& activations() const { return activations_; }
  /// Forms `hits` from the last selection.
  void transpose();
  /// The entries of `activations` by feature.
  const kernels::FeatureHits& hits() const { return hits_; }

  /// Returns the statistics of the last selection. Waits for the device.
  const kernels::SelectionStatistics& statistics();
  const SelectionSizes& sizes() const { return buffers_.sizes; }
  /// True if the host waits for nothing in `select`, so that a step can be captured as a graph.
  virtual bool is_on_device() const { return false; }
  virtual ControllerState controller_state() = 0;
  /// Makes `select` set *fault, in memory of the kernels, to 1 if its result is not valid (else leave it): more entries
  /// than the lists hold, or a producer that did not repeat its bits, for which the host driver throws.
  virtual void report_faults_to(std::int32_t* fault) { static_cast<void>(fault); }
  /// Describes the first selection of this rank that was not valid, with layer and counts; "" if all were valid. Waits
  /// for the device.
  virtual std::string first_fault() { return {}; }

  /// True if the driver formed the products of the last `select` itself, from its operands, and did not store them.
  virtual bool forms_products() const { return false; }

  /// Exchanges of this rank since construction, under the name "selection".
  virtual parallel::Exchanges exchanges() const = 0;
  /// Forward to the functions of parallel::DeviceCommunicator, for the exchanges between devices.
  virtual void observe(const parallel::ExchangeObserver*) {}
  virtual void mark(device::IdleClock*) {}

 protected:
  static constexpr const char* kName = "selection";  // name of its exchanges
  /// One call of `select`.
  struct Batch {
    std::int64_t n_tokens_total = 0;
    std::int64_t n_tokens = 0;  ///< tokens of this rank's data group
    parallel::Range features;   ///< features of this rank, global indices
    std::int64_t budget = 0;
    std::span<const kernels::Array<const float>> bias, bounds = {};
    const Producer* produce = nullptr;
    const kernels::EncoderOperands* operands = nullptr;
  };

  /// The arena of the buffers must outlive the selector.
  Selector(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&, const kernels::Execution&);

  /// Sets all arrays of activations(), and the statistics as far as the host knows them, except for entries.
  virtual void select_batch(const Batch&) = 0;
  /// Enqueues the work before the first tile of `followed_`.
  virtual void begin();
  /// Completes the statistics. Called when the device has finished.
  virtual void read_statistics() {}

  const SelectionSpec spec_;
  const SelectionBuffers buffers_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  kernels::SelectionStatistics statistics_;
  Batch followed_;  // batch of `follow`

 private:
  Batch start(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer);
  double k_;
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

/// Sums values over all ranks, in place.
using SumOverRanks = std::function<void(kernels::Array<std::int64_t>)>;
/// Wraps the sum of histograms that a driver uses.
using SumDecorator = std::function<SumOverRanks(SumOverRanks)>;

}  // namespace weft::transcoder

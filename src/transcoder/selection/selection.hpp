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
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "kernels/workspace.hpp"
#include "parallel/grid.hpp"
#include "parallel/traffic.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::transcoder {

/// Sizes of a selection over all ranks.
struct SelectionShape {
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer
  std::int64_t max_tokens = 0;  ///< tokens of the largest batch
  std::int64_t tile_bytes = 0;  ///< bytes of products computed at a time; 0: chosen for the backend
  parallel::ExchangeStrategy exchange = {};
  const SelectorFactory* factory = nullptr;  ///< null: the drivers of this folder
  bool follows = false;  ///< takes the tiles of another selector (Selector::follow): no memory for its own
};

/// Returns the sizes of the selection of batches of at most `max_tokens`, over all ranks.
SelectionShape selection_shape(const Configuration&, const Shape&, std::int64_t max_tokens);
/// Returns the settings of a selector of dead features (transcoder.auxk).
ModelSettings selection_of_dead_features(const ModelSettings&);

/// Memory and sizes of a selection on a rank: the largest rank where parts are uneven.
struct SelectionSizes {
  std::int64_t capacity = 0;       ///< entries of the sparse activations (list_capacity)
  std::int64_t tile_tokens = 0;    ///< a tile of products has at most this many tokens ...
  std::int64_t tile_features = 0;  ///< ... and features
  std::int64_t device_bytes = 0;   ///< all buffers of the selector, where the kernels run
  std::int64_t host_bytes = 0;     ///< staging memory on the host
  std::int64_t on_gpu_bytes = 0;   ///< part of device_bytes: the workspace of the device driver; 0: another driver

  std::int64_t max_tokens = 0;    ///< tokens of one data group
  std::int64_t max_features = 0;  ///< features per layer of one rank
  std::int64_t n_groups = 0;      ///< groups of the batch (batch_topk) or of a token (topk)
};

/// Returns SelectionSizes::capacity. relu and jumprelu keep any number of entries: settings.capacity bounds it.
std::int64_t list_capacity(const ModelSettings&, const SelectionShape&, const parallel::GridShape&);
/// Returns the capacity of the lists of the features that a rank updates, over the tokens of the whole batch
/// (axes/data_axis.hpp): enough for all entries that the lists of all groups can hold.
std::int64_t owned_list_capacity(const ModelSettings&, const SelectionShape&, const parallel::GridShape&);

/// Returns K of each group (kernels/transcoder/select/selection_rule.hpp) for n_tokens_total tokens of the whole batch;
/// relu, jumprelu: the largest integer.
std::int64_t selection_budget(const ModelSettings&, std::int64_t n_layers, std::int64_t n_tokens_total);

/// Statistics of the last selection, equal on all ranks except for entries and passes.
struct SelectionStatistics {
  std::vector<float> threshold;  ///< K-th value of each group; 0 if fewer than K are positive (batch_topk only)
  std::int64_t entries = 0;      ///< active entries of this rank
  std::int64_t passes = 0;       ///< passes over the tiles begun on this rank, usually 1
  std::int64_t redos = 0;        ///< times that a threshold was too high and all ranks began again (host driver)
  std::int64_t ties_cut = 0;     ///< candidates at a K-th value that are not selected
};

/// One rectangle of products to compute, in this rank's indices.
struct TileRequest {
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int64_t feature_begin = 0;
  std::int64_t feature_count = 0;
};

/// Everything that determines the buffers of a selector.
struct SelectionSpec {
  ModelSettings settings;
  SelectionShape shape;
  parallel::GridShape grid;
  Precision precision = Precision::fp32;
  kernels::Backend backend = kernels::Backend::portable;

  kernels::Scalar product() const {
    return precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
  }
};

/// Device and host memory for the members of `Arrays`, which its constructor takes from two workspaces:
///   Arrays(const SelectionSpec&, const SelectionSizes&, kernels::Workspace& device, kernels::Workspace& host)
/// `add_bytes` measures with the same constructor.
template <class Arrays>
class PlacedArrays {
 public:
  static void add_bytes(const SelectionSpec& spec, SelectionSizes& sizes) {
    kernels::Workspace device(nullptr), host(nullptr);
    const Arrays arrays(spec, sizes, device, host);
    sizes.device_bytes += device.bytes();
    sizes.host_bytes += host.bytes();
  }
  PlacedArrays(const SelectionSpec& spec, const SelectionSizes& sizes) {
    SelectionSizes own = sizes;
    own.device_bytes = own.host_bytes = 0;
    add_bytes(spec, own);
    device_ = {own.device_bytes, device::Allocation::Where::device};
    host_ = {own.host_bytes, device::Allocation::Where::host};
    kernels::Workspace device(device_.data()), host(host_.data());
    arrays_.emplace(spec, sizes, device, host);
  }
  const Arrays* operator->() const { return &*arrays_; }

 private:
  device::Allocation device_, host_;
  std::optional<Arrays> arrays_;
};

class Selector {
 public:
  /// Fills `product` [token_count, feature_count] on the stream of the given execution. Must give the same bits when
  /// called again for the same tile.
  using Producer = std::function<void(const kernels::Execution&, const TileRequest&, kernels::AnyMatrix product)>;

  /// Filter thresholds for the next batch, one key per group (batch_topk; else empty). They are part of a checkpoint,
  /// so that a resumed run also takes the same time. Any content gives the same result.
  struct ControllerState {
    kernels::Array<std::uint32_t> keys;
    bool on_device = false;
  };

  /// Adds the buffers that every driver has to sizes.device_bytes and host_bytes.
  static void add_bytes(const SelectionSpec&, SelectionSizes& sizes);

  virtual ~Selector() = default;
  Selector(const Selector&) = delete;
  Selector& operator=(const Selector&) = delete;

  /// Sets the k that later selections use in place of settings.k, which it must not exceed (batch_topk, topk).
  void keep(double k) { k_ = k; }
  /// Selects the active features of a batch. Collective over the grid. n_tokens_total: tokens of this batch over all
  /// ranks, at most max_tokens; this rank has grid.part(parallel::kDataAxis, n_tokens_total). bias_of_layer: L arrays
  /// of this rank's features, on the device. cut_of_layer, with jumprelu only: L arrays of the values that features
  /// must exceed (kernels::jump_cut). operands: the operands of the producer's products; a driver that forms the
  /// products itself does not call the producer.
  void select(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer, const Producer&,
              std::span<const kernels::Array<const float>> cut_of_layer = {},
              const kernels::EncoderOperands* operands = nullptr);

  /// Replace `select` with SelectionShape::follows (topk only): call follow; then `take` for every tile of another
  /// selector of the same sizes, grid and batch, as it produces them (whole passes over the tiles or parts of passes,
  /// each from the first tile on; the last one whole); then `finish`. The biases must remain valid until then.
  void follow(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer);
  virtual void take(const kernels::Execution&, const TileRequest&, kernels::AnyMatrix product);
  virtual void finish();

  /// The result of `select` or `finish`, until the next one.
  const kernels::SparseActivations& activations() const { return activations_; }
  /// Forms `hits` from the last selection.
  void transpose();
  /// The entries of `activations` by feature.
  const kernels::FeatureHits& hits() const { return hits_; }

  /// Returns the statistics of the last selection. Waits for the device.
  const SelectionStatistics& statistics();
  const SelectionSizes& sizes() const { return sizes_; }
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
    std::span<const kernels::Array<const float>> bias, cut = {};
    const Producer* produce = nullptr;
    const kernels::EncoderOperands* operands = nullptr;
  };

  Selector(const SelectionSpec&, const SelectionSizes&, const parallel::Grid&, const kernels::Execution&);

  /// Sets all arrays of activations(), and the statistics as far as the host knows them, except for entries.
  virtual void select_batch(const Batch&) = 0;
  /// Enqueues the work before the first tile of `followed_`.
  virtual void begin();
  /// Completes the statistics. Called when the device has finished.
  virtual void read_statistics() {}

  const SelectionSpec spec_;
  const SelectionSizes sizes_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  SelectionStatistics statistics_;
  Batch followed_;  // batch of `follow`

 private:
  Batch start(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer);
  struct ResultArrays {
    ResultArrays(const SelectionSpec&, const SelectionSizes&, kernels::Workspace& device, kernels::Workspace& host);

    kernels::Array<std::int64_t> row_offsets;  // CSR
    kernels::Array<std::uint32_t> key;
    kernels::Array<float> value;
    kernels::Array<std::int64_t> hit_offsets;  // CSC
    kernels::Array<std::uint32_t> hit_token;
    kernels::Array<std::uint32_t> hit_position;
    kernels::Array<std::byte> transpose_workspace;
    kernels::Array<std::int64_t> n_entries;  // [1], host
  };

  double k_;
  PlacedArrays<ResultArrays> result_;
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

/// Sums values over all ranks, in place.
using SumOverRanks = std::function<void(kernels::Array<std::int64_t>)>;
/// Wraps the sum of histograms that a driver uses.
using SumDecorator = std::function<SumOverRanks(SumOverRanks)>;

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/selection_on_rank_0.hpp"

#include <algorithm>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::bench {
namespace {

/// Rows of products begin at multiples of 16 bytes for either type.
std::int64_t padded(std::int64_t features) { return (features + 7) / 8 * 8; }

/// The selection of all products on one rank.
transcoder::SelectionSpec on_one_rank(transcoder::SelectionSpec spec) {
  spec.grid = parallel::data_by_feature(1, 1);
  spec.exchange = {};
  spec.factory = nullptr;
  return spec;
}

/// Elements of this rank's products of one layer.
std::int64_t own_elements(const transcoder::SelectionSizes& sizes) {
  return sizes.max_tokens * padded(sizes.max_features);
}

/// Elements of the products of one layer on all ranks.
std::int64_t largest_layer(const transcoder::SelectionSpec& spec) {
  std::int64_t columns = 0;
  for (std::int64_t g = 0; g < spec.grid.size(parallel::kFeatureAxis); ++g)
    columns += padded(parallel::part(spec.n_features, spec.grid.size(parallel::kFeatureAxis), g).size());
  return spec.max_tokens * columns;
}

/// Most bytes that a rank sends or receives in one call: a layer's products, or one of the lists.
std::int64_t largest_message(const transcoder::SelectionSpec& spec) {
  return std::max({largest_layer(spec) * kernels::bytes_of(spec.product()), 8 * (spec.max_tokens + 1),
                   4 * transcoder::list_capacity(on_one_rank(spec))});
}

class SelectorOnRankZero final : public transcoder::Selector {
 public:
  SelectorOnRankZero(const transcoder::SelectionSpec& spec, const transcoder::SelectionBuffers& buffers,
                     const parallel::Grid& grid, const kernels::Execution& execution)
      : transcoder::Selector(spec, buffers, grid, execution),
        lists_capacity_(transcoder::list_capacity(on_one_rank(spec))),
        alone_(grid.world().split(grid.world().rank(), 0), parallel::data_by_feature(1, 1)),
        arena_(execution, alone_),
        exchange_(grid.all_on_an_axis(), execution, largest_message(spec), spec.exchange),
        own_(buffer(own_elements(sizes()) * element_)) {
    if (grid.world().rank() == 0) {
      all_ = buffer(spec.n_layers * largest_layer(spec) * element_);
      bias_ = buffer(spec.n_layers * spec.n_features * 4);
      const transcoder::SelectionSpec of_all = on_one_rank(spec);
      select_ = transcoder::make_selector(of_all, transcoder::SelectionBuffers(of_all, arena_), alone_, execution);
    } else {
      row_offsets_ = buffer((spec.max_tokens + 1) * 8);
      key_ = buffer(lists_capacity_ * 4);
      value_ = buffer(lists_capacity_ * 4);
    }
    // Other ranks have a state of the same size, which is never used.
    controller_.assign(static_cast<std::size_t>(sizes().n_groups), 0);
  }

  ControllerState controller_state() override {
    if (select_) return select_->controller_state();
    return {{controller_.data(), static_cast<std::int64_t>(controller_.size())}, false};
  }
  void report_faults_to(std::int32_t* fault) override {
    if (select_) select_->report_faults_to(fault);
  }
  std::string first_fault() override { return select_ ? select_->first_fault() : std::string(); }
  parallel::Exchanges exchanges() const override { return exchange_.exchanges(); }
  void observe(const parallel::ExchangeObserver* observer) override { exchange_.observe(observer); }
  void mark(device::IdleClock* idle) override { exchange_.mark(idle); }

 private:
  /// The products of one layer on one rank: their tokens and features, and their position among those of all ranks.
  struct Piece {
    parallel::Range tokens, features;
    std::int64_t offset, stride;  // elements
  };

  void select_batch(const Batch&) override;
  std::vector<Piece> pieces_of_layer(std::int64_t n_tokens_total) const;  // pieces of all ranks, in their order
  void gather(const Batch&);
  void fill(const kernels::Execution&, std::int64_t n_tokens_total, const kernels::TileRange&,
            kernels::AnyMatrix product) const;
  void share_lists(const Batch&);
  /// Known to this rank only: NCCL need not register gigabytes that exist for a measurement.
  parallel::ExchangeBuffer buffer(std::int64_t bytes) const { return {alone_.world(), bytes, spec_.exchange}; }

  const std::int64_t element_ = kernels::bytes_of(spec_.product());
  std::int64_t lists_capacity_;  // entries of all ranks
  parallel::Grid alone_;         // this rank
  model::StepArena arena_;       // rank 0: memory of select_
  parallel::DeviceCommunicator exchange_;
  parallel::ExchangeBuffer own_;                        // this rank's products of a layer
  parallel::ExchangeBuffer all_;                        // rank 0: [L] products of a layer, rank after rank
  parallel::ExchangeBuffer bias_;                       // rank 0: [L, F]
  std::unique_ptr<transcoder::Selector> select_;        // rank 0
  parallel::ExchangeBuffer row_offsets_, key_, value_;  // other ranks: the lists of rank 0
  kernels::SparseActivations lists_;
  std::vector<std::uint32_t> controller_;
};

std::vector<SelectorOnRankZero::Piece> SelectorOnRankZero::pieces_of_layer(std::int64_t n_tokens_total) const {
  std::vector<Piece> pieces;
  std::int64_t offset = 0;
  for (std::int64_t d = 0; d < grid_.size(parallel::kDataAxis); ++d)
    for (std::int64_t g = 0; g < grid_.size(parallel::kFeatureAxis); ++g) {
      const parallel::Range tokens = parallel::part(n_tokens_total, grid_.size(parallel::kDataAxis), d),
                            features = parallel::part(spec_.n_features, grid_.size(parallel::kFeatureAxis), g);
      pieces.push_back({tokens, features, offset, padded(features.size())});
      offset += tokens.size() * pieces.back().stride;
    }
  return pieces;
}

void SelectorOnRankZero::select_batch(const Batch& batch) {
  gather(batch);
  if (select_) {
    std::vector<kernels::Array<const float>> bias;
    for (std::int64_t layer = 0; layer < spec_.n_layers; ++layer)
      bias.push_back({reinterpret_cast<const float*>(bias_.data()) + layer * spec_.n_features, spec_.n_features});
    select_->select(batch.n_tokens_total, bias,
                    [&](const kernels::Execution& execution, const kernels::TileRange& tile,
                        kernels::AnyMatrix product) { fill(execution, batch.n_tokens_total, tile, product); });
    statistics_ = select_->statistics();
    lists_ = select_->activations();
    all_.close();
    bias_.close();
  }
  statistics_.passes = 1;
  share_lists(batch);
  statistics_.entries = 0;  // entries of this rank, which `statistics` counts
}

/// Collects all products and biases on rank 0.
void SelectorOnRankZero::gather(const Batch& batch) {
  const std::vector<Piece> pieces = pieces_of_layer(batch.n_tokens_total);
  const bool receives = select_ != nullptr;
  const std::int64_t element = element_, rank = grid_.world().rank();
  const Piece& own = pieces[static_cast<std::size_t>(rank)];
  const std::int64_t n_tokens = own.tokens.size(), n_features = own.features.size(),
                     layer_elements = largest_layer(spec_);

  std::vector<std::int64_t> nothing(pieces.size(), 0);
  std::vector<std::int64_t> product_out = nothing, product_in = nothing, bias_out = nothing, bias_in = nothing;
  product_out[0] = n_tokens * own.stride * element;
  if (grid_.index(parallel::kDataAxis) == 0) bias_out[0] = n_features * 4;  // the other groups have the same
  if (receives)
    for (std::size_t r = 0; r < pieces.size(); ++r) {
      product_in[r] = pieces[r].tokens.size() * pieces[r].stride * element;
      if (static_cast<std::int64_t>(r) < grid_.size(parallel::kFeatureAxis)) bias_in[r] = pieces[r].features.size() * 4;
    }

  std::byte* const all = receives ? all_.open() : nullptr;
  std::byte* const bias = receives ? bias_.open() : nullptr;
  for (std::int64_t layer = 0; layer < spec_.n_layers; ++layer) {
    // The tiles are those of the other selectors: the dense library gives the same bits for the same shapes.
    const kernels::AnyMatrix products{own_.open(), spec_.product(), n_tokens, n_features, own.stride};
    for (std::int64_t feature = 0; feature < n_features; feature += sizes().tile_features)
      for (std::int64_t token = 0; token < n_tokens; token += sizes().tile_tokens) {
        const kernels::TileRange tile{layer, token, std::min(sizes().tile_tokens, n_tokens - token), feature,
                                      std::min(sizes().tile_features, n_features - feature)};
        (*batch.produce)(execution_, tile,
                         products.rows_from(token, tile.token_count).columns_from(feature, tile.feature_count));
      }
    exchange_.all_to_all(products.data, product_out, receives ? all + layer * layer_elements * element : nullptr,
                         product_in, kName);
    exchange_.all_to_all(batch.bias[static_cast<std::size_t>(layer)].data, bias_out,
                         receives ? bias + layer * spec_.n_features * 4 : nullptr, bias_in, kName);
    own_.close();
  }
}

/// A tile of the gathered products.
void SelectorOnRankZero::fill(const kernels::Execution& execution, std::int64_t n_tokens_total,
                              const kernels::TileRange& tile, kernels::AnyMatrix product) const {
  const std::int64_t element = element_;
  std::byte* const layer = all_.data() + tile.layer * largest_layer(spec_) * element;
  const parallel::Range tokens{tile.token_begin, tile.token_begin + tile.token_count},
      features{tile.feature_begin, tile.feature_begin + tile.feature_count};
  for (const Piece& piece : pieces_of_layer(n_tokens_total)) {
    const parallel::Range n = intersection(tokens, piece.tokens), f = intersection(features, piece.features);
    if (n.size() == 0 || f.size() == 0) continue;
    const kernels::AnyMatrix from{layer + piece.offset * element, spec_.product(), piece.tokens.size(),
                                  piece.features.size(), piece.stride};
    kernels::copy_rows(
        execution,
        from.rows_from(n.begin - piece.tokens.begin, n.size()).columns_from(f.begin - piece.features.begin, f.size()),
        product.rows_from(n.begin - tokens.begin, n.size()).columns_from(f.begin - features.begin, f.size()));
  }
}

/// Sends rank 0's lists to all ranks; each keeps the part of its own tokens and features.
void SelectorOnRankZero::share_lists(const Batch& batch) {
  const std::int64_t n_tokens_total = batch.n_tokens_total;
  const parallel::Communicator& world = grid_.world();
  std::int64_t counts[] = {statistics_.entries, statistics_.redos, statistics_.ties_cut};
  world.broadcast(counts, sizeof counts);
  statistics_.redos = counts[1];
  statistics_.ties_cut = counts[2];
  statistics_.threshold.resize(static_cast<std::size_t>(sizes().n_groups));
  world.broadcast(statistics_.threshold.data(), sizes().n_groups * 4);

  if (!select_)
    lists_ = {n_tokens_total,
              spec_.n_layers,
              spec_.n_features,
              {reinterpret_cast<std::int64_t*>(row_offsets_.open()), n_tokens_total + 1},
              {reinterpret_cast<std::uint32_t*>(key_.open()), counts[0]},
              {reinterpret_cast<float*>(value_.open()), counts[0]}};
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world.size()), 0);
  const auto broadcast = [&](void* data, std::int64_t size) {
    bytes[0] = size;  // rank 0 has the only piece
    exchange_.all_gather(data, bytes, kName);
  };
  broadcast(lists_.row_offsets.data, (n_tokens_total + 1) * 8);
  broadcast(lists_.key.data, counts[0] * 4);
  broadcast(lists_.value.data, counts[0] * 4);
  kernels::SparseActivations of_group = lists_;
  of_group.n_tokens = activations().n_tokens;
  of_group.row_offsets.data += grid_.part(parallel::kDataAxis, n_tokens_total).begin;
  kernels::restrict_features(execution_, {&of_group, 1}, grid_.part(parallel::kFeatureAxis, spec_.n_features).begin,
                             activations(), {});
  row_offsets_.close();
  key_.close();
  value_.close();
}

}  // namespace

void SelectionOnRankZero::take(const transcoder::SelectionSpec& spec, transcoder::SelectionBuffers& buffers,
                               model::StepArena& arena) const {
  if (spec.grid.ranks() == 1) return transcoder::take_driver_buffers(spec, buffers, arena);
  const std::int64_t element = kernels::bytes_of(spec.product());
  model::StepArena alone(arena.backend());
  const transcoder::SelectionBuffers of_all(on_one_rank(spec), alone);
  arena.count(model::StepArena::Where::device,
              (own_elements(buffers.sizes) + spec.n_layers * largest_layer(spec)) * element +
                  spec.n_layers * spec.n_features * 4 + alone.device_bytes());
  arena.count(model::StepArena::Where::host, alone.host_bytes());
  arena.communicator(spec.grid.ranks(), largest_message(spec));
}

std::unique_ptr<transcoder::Selector> SelectionOnRankZero::make(const transcoder::SelectionSpec& spec,
                                                                const transcoder::SelectionBuffers& buffers,
                                                                const parallel::Grid& grid,
                                                                const kernels::Execution& execution) const {
  if (spec.grid.ranks() == 1) return transcoder::make_driver(spec, buffers, grid, execution);
  return std::make_unique<SelectorOnRankZero>(spec, buffers, grid, execution);
}

}  // namespace weft::bench

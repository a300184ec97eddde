// SPDX-License-Identifier: Apache-2.0
#include "transcoder/benchmark/selection_on_rank_0.hpp"

#include <algorithm>

#include "kernels/convert/convert.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"

namespace weft::transcoder {
namespace {

constexpr const char* kName = "selection";  // of its exchanges

/// Rows of products begin at multiples of 16 bytes, whatever their type.
std::int64_t padded(std::int64_t features) { return (features + 7) / 8 * 8; }

SelectionShape shape_alone(SelectionShape shape) {
  shape.manner = {};
  return shape;
}

std::int64_t largest_own(const SelectionSizes& sizes) { return sizes.max_tokens * padded(sizes.max_features); }

/// Elements of the products of one layer on all ranks.
std::int64_t largest_layer(const SelectionShape& shape, const parallel::GridShape& grid) {
  std::int64_t columns = 0;
  for (std::int64_t g = 0; g < grid.size(parallel::kFeatureAxis); ++g)
    columns += padded(parallel::part(shape.n_features, grid.size(parallel::kFeatureAxis), g).size());
  return shape.max_tokens * columns;
}

/// Bytes that some rank sends or receives in one call, at most: a layer's products, or one of the lists.
std::int64_t largest_message(const SelectionShape& shape, const parallel::GridShape& grid, std::int64_t element,
                             std::int64_t capacity) {
  return std::max({largest_layer(shape, grid) * element, 8 * (shape.max_tokens + 1), 4 * capacity});
}

}  // namespace

SelectionOnRankZero::Memory SelectionOnRankZero::memory(const ModelSettings& settings, const SelectionShape& shape,
                                                        const parallel::GridShape& grid, Precision precision,
                                                        kernels::Backend backend) {
  const std::int64_t element = precision == Precision::bf16 ? 2 : 4;
  const SelectionSizes alone = selection_sizes(settings, shape_alone(shape), {}, precision, backend);
  const std::int64_t own = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis)) *
                           padded(parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)));
  return {(own + shape.n_layers * largest_layer(shape, grid)) * element + shape.n_layers * shape.n_features * 4 +
              alone.device_bytes,
          alone.host_bytes +
              (backend == kernels::Backend::cuda ? 2 * largest_message(shape, grid, element, alone.capacity) : 0)};
}

SelectionOnRankZero::SelectionOnRankZero(const ModelSettings& settings, const SelectionShape& shape,
                                         const SelectionSizes& sizes, const parallel::Grid& grid,
                                         const kernels::Execution& execution, Precision precision)
    : shape_(shape),
      sizes_(sizes),
      lists_capacity_(list_capacity(settings, shape, {})),
      grid_(grid),
      execution_(execution),
      type_(precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32),
      alone_(grid.world().split(grid.world().rank(), 0), parallel::data_by_feature(1, 1)),
      exchange_(grid.all_on_an_axis(), execution,
                largest_message(shape, grid.shape(), kernels::bytes_of(type_), lists_capacity_), shape.manner.way),
      own_(buffer(largest_own(sizes) * kernels::bytes_of(type_))) {
  if (grid.world().rank() == 0) {
    all_ = buffer(shape.n_layers * largest_layer(shape, grid.shape()) * kernels::bytes_of(type_));
    bias_ = buffer(shape.n_layers * shape.n_features * 4);
    select_.emplace(settings, shape_alone(shape), alone_, execution, precision);
  } else {
    row_offsets_ = buffer((shape.max_tokens + 1) * 8);
    key_ = buffer(lists_capacity_ * 4);
    value_ = buffer(lists_capacity_ * 4);
  }
}

/// Of this rank alone: NCCL need not know gigabytes that live for a measurement.
parallel::ExchangeBuffer SelectionOnRankZero::buffer(std::int64_t bytes) const {
  return {alone_.world(), bytes, shape_.manner.way};
}

std::optional<Selection::ControllerState> SelectionOnRankZero::controller_state() {
  return select_ ? std::optional(select_->controller_state()) : std::nullopt;
}

std::vector<SelectionOnRankZero::Piece> SelectionOnRankZero::pieces_of_layer(std::int64_t n_tokens_total) const {
  std::vector<Piece> pieces;
  std::int64_t offset = 0;
  for (std::int64_t d = 0; d < grid_.size(parallel::kDataAxis); ++d)
    for (std::int64_t g = 0; g < grid_.size(parallel::kFeatureAxis); ++g) {
      const parallel::Range tokens = parallel::part(n_tokens_total, grid_.size(parallel::kDataAxis), d),
                            features = parallel::part(shape_.n_features, grid_.size(parallel::kFeatureAxis), g);
      pieces.push_back({tokens, features, offset, padded(features.size())});
      offset += tokens.size() * pieces.back().stride;
    }
  return pieces;
}

void SelectionOnRankZero::select(std::int64_t n_tokens_total,
                                 std::span<const kernels::Array<const float>> bias_of_layer,
                                 const Selection::Producer& produce, const kernels::SparseActivations& activations,
                                 SelectionStatistics& statistics) {
  gather(n_tokens_total, bias_of_layer, produce);
  if (select_) {
    std::vector<kernels::Array<const float>> bias;
    for (std::int64_t layer = 0; layer < shape_.n_layers; ++layer)
      bias.push_back({reinterpret_cast<const float*>(bias_.data()) + layer * shape_.n_features, shape_.n_features});
    select_->select(n_tokens_total, bias,
                    [&](const kernels::Execution& execution, const TileRequest& tile, kernels::AnyMatrix product) {
                      fill(execution, n_tokens_total, tile, product);
                    });
    statistics = select_->statistics();
    lists_ = select_->activations();
    all_.close();
    bias_.close();
  }
  statistics.passes = 1;
  share_lists(n_tokens_total, activations, statistics);
  statistics.entries = 0;  // of this rank: whoever asks counts them
}

/// All products and biases, on rank 0.
void SelectionOnRankZero::gather(std::int64_t n_tokens_total,
                                 std::span<const kernels::Array<const float>> bias_of_layer,
                                 const Selection::Producer& produce) {
  const std::vector<Piece> pieces = pieces_of_layer(n_tokens_total);
  const bool receives = select_.has_value();
  const std::int64_t element = kernels::bytes_of(type_), rank = grid_.world().rank();
  const Piece& own = pieces[static_cast<std::size_t>(rank)];
  const std::int64_t n_tokens = own.tokens.size(), n_features = own.features.size(),
                     layer_elements = largest_layer(shape_, grid_.shape());

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
  for (std::int64_t layer = 0; layer < shape_.n_layers; ++layer) {
    // The tiles of a selection everywhere: the dense library gives the same bits for the same shapes.
    const kernels::AnyMatrix products{own_.open(), type_, n_tokens, n_features, own.stride};
    for (std::int64_t feature = 0; feature < n_features; feature += sizes_.tile_features)
      for (std::int64_t token = 0; token < n_tokens; token += sizes_.tile_tokens) {
        const TileRequest tile{layer, token, std::min(sizes_.tile_tokens, n_tokens - token), feature,
                               std::min(sizes_.tile_features, n_features - feature)};
        produce(execution_, tile,
                products.rows_from(token, tile.token_count).columns_from(feature, tile.feature_count));
      }
    exchange_.all_to_all(products.data, product_out, receives ? all + layer * layer_elements * element : nullptr,
                         product_in, kName);
    exchange_.all_to_all(bias_of_layer[static_cast<std::size_t>(layer)].data, bias_out,
                         receives ? bias + layer * shape_.n_features * 4 : nullptr, bias_in, kName);
    own_.close();
  }
}

/// A tile of the gathered products.
void SelectionOnRankZero::fill(const kernels::Execution& execution, std::int64_t n_tokens_total,
                               const TileRequest& tile, kernels::AnyMatrix product) const {
  const std::int64_t element = kernels::bytes_of(type_);
  std::byte* const layer = all_.data() + tile.layer * largest_layer(shape_, grid_.shape()) * element;
  const parallel::Range tokens{tile.token_begin, tile.token_begin + tile.token_count},
      features{tile.feature_begin, tile.feature_begin + tile.feature_count};
  for (const Piece& piece : pieces_of_layer(n_tokens_total)) {
    const parallel::Range n = intersection(tokens, piece.tokens), f = intersection(features, piece.features);
    if (n.size() == 0 || f.size() == 0) continue;
    const kernels::AnyMatrix from{layer + piece.offset * element, type_, piece.tokens.size(), piece.features.size(),
                                  piece.stride};
    kernels::copy_rows(
        execution,
        from.rows_from(n.begin - piece.tokens.begin, n.size()).columns_from(f.begin - piece.features.begin, f.size()),
        product.rows_from(n.begin - tokens.begin, n.size()).columns_from(f.begin - features.begin, f.size()));
  }
}

/// Rank 0's lists to all; each keeps the part of its own tokens and features.
void SelectionOnRankZero::share_lists(std::int64_t n_tokens_total, const kernels::SparseActivations& activations,
                                      SelectionStatistics& statistics) {
  const parallel::Communicator& world = grid_.world();
  std::int64_t counts[] = {statistics.entries, statistics.redos, statistics.ties_cut};
  world.broadcast(counts, sizeof counts);
  statistics.redos = counts[1];
  statistics.ties_cut = counts[2];
  statistics.threshold.resize(static_cast<std::size_t>(sizes_.n_groups));
  world.broadcast(statistics.threshold.data(), sizes_.n_groups * 4);

  if (!select_)
    lists_ = {n_tokens_total,
              shape_.n_layers,
              shape_.n_features,
              {reinterpret_cast<std::int64_t*>(row_offsets_.open()), n_tokens_total + 1},
              {reinterpret_cast<std::uint32_t*>(key_.open()), counts[0]},
              {reinterpret_cast<float*>(value_.open()), counts[0]}};
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world.size()), 0);
  const auto broadcast = [&](void* data, std::int64_t size) {
    bytes[0] = size;  // the piece of rank 0 is all there is
    exchange_.all_gather(data, bytes, kName);
  };
  broadcast(lists_.row_offsets.data, (n_tokens_total + 1) * 8);
  broadcast(lists_.key.data, counts[0] * 4);
  broadcast(lists_.value.data, counts[0] * 4);
  kernels::SparseActivations of_group = lists_;
  of_group.n_tokens = activations.n_tokens;
  of_group.row_offsets.data += grid_.part(parallel::kDataAxis, n_tokens_total).begin;
  kernels::restrict_features(execution_, {&of_group, 1}, grid_.part(parallel::kFeatureAxis, shape_.n_features).begin,
                             activations);
  row_offsets_.close();
  key_.close();
  value_.close();
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/decoder_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "device/memory.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/by_target.hpp"
#include "run/pass.hpp"

namespace weft::transcoder {
namespace {

constexpr double kNotFormed = std::numeric_limits<double>::quiet_NaN();
/// Bytes of a block of rows in fp32.
constexpr std::int64_t kBlockBytes = std::int64_t{64} << 20;
constexpr std::int64_t kMostBlockRows = 4096;

std::int64_t block_rows(std::int64_t columns) {
  return std::clamp<std::int64_t>(kBlockBytes / (columns * 4), 1, kMostBlockRows);
}

/// The largest entries of rows that are formed in blocks, where the kernels run.
class Largest {
 public:
  Largest(std::int64_t rows, std::int64_t k, const kernels::Execution& execution)
      : rows_(rows), k_(k), value_(std::max<std::int64_t>(1, rows * k)), index_(value_.size()), execution_(execution) {
    const std::vector<std::int64_t> none(static_cast<std::size_t>(index_.size()), -1);
    device::copy(execution_, index_.data(), none.data(), index_.bytes(), device::Direction::to_device);
    kernels::fence(execution_);
  }
  /// The part that belongs to rows [begin, begin + count).
  kernels::LargestOfRows rows(std::int64_t begin, std::int64_t count) const {
    return {{value_.data() + begin * k_, count, k_, k_}, {index_.data() + begin * k_, count, k_, k_}};
  }
  LargestEntries entries() const {
    LargestEntries host;
    host.value.resize(static_cast<std::size_t>(rows_ * k_));
    host.index.resize(host.value.size());
    device::copy(execution_, host.value.data(), value_.data(), rows_ * k_ * 4, device::Direction::to_host);
    device::copy(execution_, host.index.data(), index_.data(), rows_ * k_ * 8, device::Direction::to_host);
    kernels::fence(execution_);
    return host;
  }

 private:
  const std::int64_t rows_, k_;
  const device::Buffer<float> value_;
  const device::Buffer<std::int64_t> index_;
  const kernels::Execution execution_;
};

/// Joins the products of all rows with all others to `largest`; the first of the others has the index `first`. With
/// `ranks`, the others are those of this rank's part of n_features, and those of the other ranks take part. Collective
/// over `ranks`.
void add_products(const Largest& largest, const RowBlocks& rows, const RowBlocks& others, std::int64_t columns,
                  float sign, std::int64_t first, std::int64_t self, const parallel::Communicator* ranks,
                  std::int64_t n_features, const std::string& what, const kernels::Execution& execution) {
  using kernels::Scalar;
  const std::int64_t most = block_rows(columns);
  const device::Buffer<float> own(most * columns), block(most * columns), products(most * most);
  const device::Buffer<std::byte> workspace(
      kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, most, most, columns));
  std::vector<float> host;
  const std::int64_t n_ranks = ranks == nullptr ? 1 : ranks->size(), here = ranks == nullptr ? 0 : ranks->rank();
  const std::int64_t n_others = ranks == nullptr ? others.rows : n_features;
  run::Pass pass(what, rows.rows * n_others, "pairs");
  std::int64_t pairs = 0;
  for (std::int64_t g = 0; g < n_ranks; ++g) {
    const parallel::Range theirs = parallel::part(n_others, n_ranks, g);
    for (std::int64_t begin = 0; begin < theirs.size(); begin += most) {
      const std::int64_t count = std::min(most, theirs.size() - begin);
      // Rows of other ranks pass through the host: each block once, for a product with all rows of this rank.
      if (g == here) others.form(begin, block.matrix(count, columns));
      if (n_ranks > 1) {
        host.resize(static_cast<std::size_t>(count * columns));
        if (g == here)
          device::copy(execution, host.data(), block.data(), count * columns * 4, device::Direction::to_host);
        kernels::fence(execution);
        ranks->broadcast(host.data(), count * columns * 4, static_cast<int>(g));
        if (g != here)
          device::copy(execution, block.data(), host.data(), count * columns * 4, device::Direction::to_device);
      }
      for (std::int64_t row = 0; row < rows.rows; row += most) {
        const std::int64_t n = std::min(most, rows.rows - row);
        rows.form(row, own.matrix(n, columns));
        kernels::gemm(execution, 1.0f, {own.data(), Scalar::fp32, n, columns, columns}, kernels::Form::plain,
                      {block.data(), Scalar::fp32, count, columns, columns}, kernels::Form::transposed, 0.0f,
                      {products.data(), Scalar::fp32, n, count, count}, workspace.array());
        kernels::keep_largest(execution, {products.data(), n, count, count}, sign, first + theirs.begin + begin,
                              self == kernels::kNoIndex ? self : self + row, largest.rows(row, n));
        pass.done(pairs += n * count);
      }
      kernels::fence(execution);  // the next block overwrites this one
    }
  }
}

}  // namespace

std::int64_t row_columns(const Shape& shape, std::int64_t layer) {
  return (shape.decoder == Decoder::tied ? 1 : shape.targets(layer)) * shape.d_model;
}

void decoder_rows(const Model& model, std::int64_t layer, std::int64_t begin, const kernels::Execution& execution,
                  kernels::Matrix<float> out) {
  const Shape& shape = model.shape();
  const std::int64_t d = shape.d_model;
  const auto strip_of = [&](std::int64_t target) -> kernels::Matrix<float> {
    return {out.data + (target - layer) * d, out.rows, d, out.stride};
  };
  if (shape.decoder == Decoder::tied_target) {
    const kernels::Matrix<float> scale = model.affine().scale;
    for (std::int64_t t = layer; t < shape.n_layers; ++t) {
      kernels::weights_to_float(execution, model.decoder()[static_cast<std::size_t>(t)], begin, strip_of(t));
      if (shape.affine)
        kernels::scale_each_row(execution, {scale.row(kernels::pair_of(layer, t, shape.n_layers)) + begin, out.rows},
                                strip_of(t));
    }
    return;
  }
  kernels::weights_to_float(execution, model.decoder()[static_cast<std::size_t>(layer)], begin, out);
}

std::vector<double> squared_norms(const Model& model, std::int64_t layer, const kernels::Execution& execution) {
  const std::int64_t d = model.shape().d_model, columns = row_columns(model.shape(), layer), targets = columns / d,
                     n = model.n_local(), most = block_rows(columns);
  const std::int64_t rows = std::min(most, std::max<std::int64_t>(1, n));
  const device::Buffer<float> block(rows * columns);
  const device::Buffer<double> sums(rows * targets);
  std::vector<double> squares(static_cast<std::size_t>(n * targets));
  for (std::int64_t begin = 0; begin < n; begin += most) {
    const std::int64_t count = std::min(most, n - begin);
    decoder_rows(model, layer, begin, execution, block.matrix(count, columns));
    device::zero(execution, sums.data(), count * targets * 8);
    kernels::add_row_norms(execution, {block.data(), count * targets, d, d}, {sums.data(), count * targets});
    device::copy(execution, squares.data() + begin * targets, sums.data(), count * targets * 8,
                 device::Direction::to_host);
    kernels::fence(execution);
  }
  return squares;
}

LargestEntries nearest_features(const Model& model, std::int64_t layer, std::int64_t k, const parallel::Grid& grid,
                                const kernels::Execution& execution) {
  const parallel::Communicator& ranks = grid.axis(parallel::kFeatureAxis);
  const std::int64_t n_local = model.n_local(), columns = row_columns(model.shape(), layer);
  const std::vector<double> squares = squared_norms(model, layer, execution);
  const std::int64_t strips = columns / model.shape().d_model;
  std::vector<float> inverse(static_cast<std::size_t>(n_local));  // a row of norm 0 has cosine 0 with all
  for (std::int64_t i = 0; i < n_local; ++i) {
    const double square = std::accumulate(squares.begin() + i * strips, squares.begin() + (i + 1) * strips, 0.0);
    inverse[static_cast<std::size_t>(i)] = square > 0 ? static_cast<float>(1.0 / std::sqrt(square)) : 0.0f;
  }
  const device::Buffer<float> scale(std::max<std::int64_t>(1, n_local));
  device::copy(execution, scale.data(), inverse.data(), n_local * 4, device::Direction::to_device);
  const RowBlocks unit{n_local, [&](std::int64_t begin, kernels::Matrix<float> out) {
                         decoder_rows(model, layer, begin, execution, out);
                         kernels::scale_each_row(execution, {scale.data() + begin, out.rows}, out);
                       }};
  const Largest largest(n_local, k, execution);
  add_products(largest, unit, unit, columns, 1.0f, 0, model.features().begin, &ranks, model.shape().n_features,
               fmt::format("nearest features of layer {}", layer), execution);
  return largest.entries();
}

RowBlocks written_rows(const Model& model, const NormalisationOnDevice& normalisation, std::int64_t layer,
                       std::int64_t last, const kernels::Execution& execution) {
  const auto form = [&model, &normalisation, layer, last, execution](std::int64_t begin, kernels::Matrix<float> out) {
    const std::int64_t d = model.shape().d_model, columns = row_columns(model.shape(), layer);
    const bool one_vector = model.shape().decoder == Decoder::tied;
    const device::Buffer<float> all(out.rows * columns);
    decoder_rows(model, layer, begin, execution, all.matrix(out.rows, columns));
    using kernels::AnyMatrix;
    const AnyMatrix sum{out.data, kernels::Scalar::fp32, out.rows, d, out.stride};
    const std::int64_t end = std::min(last + 1, layer + model.shape().targets(layer));
    for (std::int64_t target = layer; target < end; ++target) {
      const std::int64_t strip = one_vector ? 0 : target - layer;
      kernels::affine_rows(execution, {all.data() + strip * d, kernels::Scalar::fp32, out.rows, d, columns},
                           {normalisation.target_spread.data() + target * d, d}, {},
                           target == layer ? AnyMatrix{} : sum, sum);
    }
    kernels::fence(execution);  // `all` is destroyed
  };
  return {model.n_local(), form};
}

LargestEntries logit_effects(const Model& model, const NormalisationOnDevice& normalisation, std::int64_t layer,
                             std::int64_t k, float sign, const RowBlocks& unembedding,
                             const kernels::Execution& execution) {
  const Largest largest(model.n_local(), k, execution);
  add_products(largest, written_rows(model, normalisation, layer, model.shape().n_layers - 1, execution), unembedding,
               model.shape().d_model, sign, 0, kernels::kNoIndex, nullptr, 0,
               fmt::format("logit effects of layer {}", layer), execution);
  LargestEntries entries = largest.entries();
  for (float& value : entries.value) value *= sign;
  return entries;
}

LargestEntries downstream_features(const Model& model, const NormalisationOnDevice& normalisation, std::int64_t layer,
                                   std::int64_t k, const parallel::Grid& grid, const kernels::Execution& execution) {
  const std::int64_t d = model.shape().d_model, n_features = model.shape().n_features;
  const Largest largest(model.n_local(), k, execution);
  for (std::int64_t reader = layer + 1; reader < model.shape().n_layers; ++reader) {
    const RowBlocks encoder{
        model.n_local(), [&](std::int64_t begin, kernels::Matrix<float> out) {
          kernels::weights_to_float(execution, model.encoder()[static_cast<std::size_t>(reader)], begin, out);
          const kernels::AnyMatrix rows{out.data, kernels::Scalar::fp32, out.rows, d, out.stride};
          kernels::affine_rows(execution, rows, {normalisation.input_scale.data() + reader * d, d}, {}, {}, rows);
        }};
    add_products(largest, written_rows(model, normalisation, layer, reader - 1, execution), encoder, d, 1.0f,
                 reader * n_features, kernels::kNoIndex, &grid.axis(parallel::kFeatureAxis), n_features,
                 fmt::format("features of layer {} that layer {} excites", reader, layer), execution);
  }
  return largest.entries();
}

DecoderSummary summarise_decoder(const Model& model, const parallel::Grid& grid, const kernels::Execution& execution) {
  const parallel::Communicator& ranks = grid.axis(parallel::kFeatureAxis);
  DecoderSummary summary;
  for (std::int64_t layer = 0; layer < model.shape().n_layers; ++layer) {
    const std::int64_t targets = row_columns(model.shape(), layer) / model.shape().d_model;
    const std::vector<double> squares = squared_norms(model, layer, execution);
    std::vector<double> share(static_cast<std::size_t>(targets), 0.0);
    for (std::size_t i = 0; i < squares.size(); ++i) share[i % static_cast<std::size_t>(targets)] += squares[i];
    ranks.sum(std::span<double>(share));
    double total = 0;
    for (const double value : share) total += value;
    for (double& value : share) value = total > 0 ? value / total : kNotFormed;
    summary.share.push_back(share);

    const LargestEntries nearest = nearest_features(model, layer, 1, grid, execution);
    std::vector<double> sums(2, 0.0);
    for (const float cosine : nearest.value) {
      sums[0] += static_cast<double>(cosine);
      sums[1] += static_cast<double>(cosine) > kRedundantCosine ? 1 : 0;
    }
    ranks.sum(std::span<double>(sums));
    const double n = static_cast<double>(model.shape().n_features);
    const bool alone = model.shape().n_features < 2;
    summary.redundancy.push_back(alone ? kNotFormed : sums[0] / n);
    summary.redundant_fraction.push_back(alone ? kNotFormed : sums[1] / n);
  }
  return summary;
}

}  // namespace weft::transcoder

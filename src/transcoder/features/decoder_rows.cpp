// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/decoder_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/memory.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
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

/// Loads rows [begin, begin + count) as fp32 into `block`, where the kernels run, and into `host`.
void load_block(const kernels::Execution& execution, const Model& model, std::int64_t layer, std::int64_t begin,
                std::int64_t count, const device::Buffer<float>& block, std::vector<float>* host) {
  const std::int64_t columns = row_columns(model.shape(), layer);
  decoder_rows(model, layer, begin, execution, block.matrix(count, columns));
  if (host == nullptr) return;
  host->resize(static_cast<std::size_t>(count * columns));
  device::copy(execution, host->data(), block.data(), count * columns * 4, device::Direction::to_host);
  kernels::fence(execution);
}

/// Gathers the norms of the decoder rows of all features of a layer, [F], from the squares of this rank's features.
std::vector<double> all_norms(const std::vector<double>& squares, std::int64_t targets, const Model& model,
                              const parallel::Grid& grid) {
  const parallel::Communicator& ranks = grid.axis(parallel::kFeatureAxis);
  std::vector<double> mine, all(static_cast<std::size_t>(model.shape().n_features));
  for (std::size_t row = 0; row * static_cast<std::size_t>(targets) < squares.size(); ++row) {
    double sum = 0;
    for (std::int64_t t = 0; t < targets; ++t)
      sum += squares[row * static_cast<std::size_t>(targets) + static_cast<std::size_t>(t)];
    mine.push_back(std::sqrt(sum));
  }
  std::vector<std::int64_t> bytes;
  for (std::int64_t g = 0; g < ranks.size(); ++g)
    bytes.push_back(parallel::part(model.shape().n_features, ranks.size(), g).size() * 8);
  ranks.all_gather_uneven(mine.data(), all.data(), bytes);
  return all;
}

/// Inserts a candidate into the k largest of a row, in order; candidates come by ascending feature.
void keep(float* cosine, std::int64_t* feature, std::int64_t k, float candidate, std::int64_t index) {
  std::int64_t at = k;
  while (at > 0 && (feature[at - 1] < 0 || candidate > cosine[at - 1])) --at;
  if (at == k) return;
  std::copy_backward(cosine + at, cosine + k - 1, cosine + k);
  std::copy_backward(feature + at, feature + k - 1, feature + k);
  cosine[at] = candidate;
  feature[at] = index;
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
  const kernels::ParameterRows& rows = model.decoder()[static_cast<std::size_t>(layer)];
  if (shape.decoder != Decoder::low_rank) {
    kernels::weights_to_float(execution, rows, begin, out);
    return;
  }
  using kernels::Scalar;
  const std::int64_t r = shape.rank;
  const device::Buffer<float> factors(out.rows * rows.columns), basis(r * d);
  const device::Buffer<std::byte> workspace(
      kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, out.rows, d, r));
  kernels::weights_to_float(execution, rows, begin, factors.matrix(out.rows, rows.columns));
  for (std::int64_t t = layer; t < shape.n_layers; ++t) {
    kernels::weights_to_float(execution, model.basis()[static_cast<std::size_t>(t)], layer * r, basis.matrix(r, d));
    kernels::gemm(execution, 1.0f, {factors.data() + (t - layer) * r, Scalar::fp32, out.rows, r, rows.columns},
                  kernels::Form::plain, {basis.data(), Scalar::fp32, r, d, d}, kernels::Form::plain, 0.0f,
                  {strip_of(t).data, Scalar::fp32, out.rows, d, out.stride}, workspace.array());
  }
  kernels::fence(execution);  // `factors` is destroyed on return
}

std::vector<double> squared_norms(const Model& model, std::int64_t layer, const kernels::Execution& execution) {
  const std::int64_t d = model.shape().d_model, columns = row_columns(model.shape(), layer), targets = columns / d,
                     n = model.n_local(), most = block_rows(columns);
  const device::Buffer<float> block(std::min(most, std::max<std::int64_t>(1, n)) * columns);
  std::vector<float> host;
  std::vector<double> squares;
  for (std::int64_t begin = 0; begin < n; begin += most) {
    const std::int64_t count = std::min(most, n - begin);
    load_block(execution, model, layer, begin, count, block, &host);
    for (std::int64_t strip = 0; strip < count * targets; ++strip) {
      double sum = 0;
      for (std::int64_t i = strip * d; i < (strip + 1) * d; ++i) {
        const double w = static_cast<double>(host[static_cast<std::size_t>(i)]);
        sum += w * w;
      }
      squares.push_back(sum);
    }
  }
  return squares;
}

Neighbours nearest_features(const Model& model, std::int64_t layer, std::int64_t k, const parallel::Grid& grid,
                            const kernels::Execution& execution) {
  const parallel::Communicator& ranks = grid.axis(parallel::kFeatureAxis);
  const std::int64_t n_features = model.shape().n_features, n_local = model.n_local(),
                     columns = row_columns(model.shape(), layer), most = block_rows(columns);
  const std::vector<double> norms =
      all_norms(squared_norms(model, layer, execution), columns / model.shape().d_model, model, grid);
  std::vector<float> inverse;  // inverses of the norms
  for (const double norm : norms) inverse.push_back(norm > 0 ? static_cast<float>(1.0 / norm) : 0.0f);

  Neighbours found;
  found.feature.assign(static_cast<std::size_t>(n_local * k), -1);
  found.cosine.assign(static_cast<std::size_t>(n_local * k), 0.0f);
  const device::Buffer<float> own(most * columns), others(most * columns), products(most * most);
  using kernels::Scalar;
  const device::Buffer<std::byte> workspace(
      kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, most, most, columns));
  std::vector<float> host_products, host_others;
  run::Pass pass(fmt::format("nearest features of layer {}", layer), n_local * n_features, "pairs");
  std::int64_t pairs = 0;
  for (std::int64_t g = 0; g < ranks.size(); ++g) {
    const parallel::Range theirs = parallel::part(n_features, ranks.size(), g);
    for (std::int64_t begin = 0; begin < theirs.size(); begin += most) {
      const std::int64_t count = std::min(most, theirs.size() - begin);
      // Rows of other ranks pass through the host: each block once, for a product with all rows of this rank.
      if (g == ranks.rank())
        load_block(execution, model, layer, begin, count, others, ranks.size() > 1 ? &host_others : nullptr);
      if (ranks.size() > 1) {
        host_others.resize(static_cast<std::size_t>(count * columns));
        ranks.broadcast(host_others.data(), count * columns * 4, static_cast<int>(g));
        if (g != ranks.rank())
          device::copy(execution, others.data(), host_others.data(), count * columns * 4, device::Direction::to_device);
      }
      for (std::int64_t first = 0; first < n_local; first += most) {
        const std::int64_t n = std::min(most, n_local - first);
        load_block(execution, model, layer, first, n, own, nullptr);
        kernels::gemm(execution, 1.0f, {own.data(), Scalar::fp32, n, columns, columns}, kernels::Form::plain,
                      {others.data(), Scalar::fp32, count, columns, columns}, kernels::Form::transposed, 0.0f,
                      {products.data(), Scalar::fp32, n, count, count}, workspace.array());
        host_products.resize(static_cast<std::size_t>(n * count));
        device::copy(execution, host_products.data(), products.data(), n * count * 4, device::Direction::to_host);
        kernels::fence(execution);
        for (std::int64_t i = 0; i < n; ++i) {
          const float scale = inverse[static_cast<std::size_t>(model.features().begin + first + i)];
          for (std::int64_t j = 0; j < count; ++j) {
            const std::int64_t other = theirs.begin + begin + j;
            if (other == model.features().begin + first + i) continue;
            keep(found.cosine.data() + (first + i) * k, found.feature.data() + (first + i) * k, k,
                 host_products[static_cast<std::size_t>(i * count + j)] * scale *
                     inverse[static_cast<std::size_t>(other)],
                 other);
          }
        }
        pass.done(pairs += n * count);
      }
    }
  }
  return found;
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

    const Neighbours nearest = nearest_features(model, layer, 1, grid, execution);
    std::vector<double> sums(2, 0.0);
    for (const float cosine : nearest.cosine) {
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

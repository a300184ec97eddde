// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/evaluation.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "base/error.hpp"
#include "base/log.hpp"
#include "dataset/activations/stored_order.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/metrics/metric_sums.hpp"
#include "kernels/reduce/reduce.hpp"
#include "run/pass.hpp"

namespace weft::transcoder {
namespace {

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

/// Unexplained fraction error / total.
double ratio(double error, double total) { return total > 0 ? error / total : kUndefined; }

/// Sum of squares about the mean of n values with these sums; 0 if the difference is within the rounding error of the
/// sums, as it is for a constant that differs from the pivot.
double about_mean(double sum, double squares, double n) {
  const double rest = squares - sum * sum / n;
  return rest > n * 0x1p-53 * squares ? rest : 0;
}

int density_bin(std::int64_t fired, std::int64_t tokens) {
  if (fired == 0) return 0;
  const double density = static_cast<double>(fired) / static_cast<double>(tokens);
  return std::clamp(static_cast<int>(std::floor(std::log10(density))) + kDensityBins, 1, kDensityBins - 1);
}

template <class T>
std::vector<T> to_host(const kernels::Execution& execution, const device::Buffer<T>& buffer) {
  std::vector<T> values(static_cast<std::size_t>(buffer.size()));
  device::copy(execution, values.data(), buffer.data(), buffer.bytes(), device::Direction::to_host);
  kernels::fence(execution);
  return values;
}

}  // namespace

const char* density_bin_name(int bin) {
  constexpr std::array<const char*, kDensityBins> names = {
      "never", "< 1e-6", "1e-6 .. 1e-5", "1e-5 .. 1e-4", "1e-4 .. 1e-3", "1e-3 .. 0.01", "0.01 .. 0.1", "0.1 .. 1"};
  return names.at(static_cast<std::size_t>(bin));
}

EvaluationResult evaluate(const dataset::Description& description, const Model& model,
                          const NormalisationOnDevice& normalisation, Forward& forward, const parallel::World& world,
                          const parallel::Grid& grid, const kernels::Execution& execution, std::int64_t batch_tokens,
                          const std::function<void()>& before_batch) {
  const Shape& shape = model.shape();
  const std::int64_t width = shape.width(), n_keys = shape.n_layers * model.n_local();
  device::Buffer<double> sums(4 * width);
  device::Buffer<std::int64_t> fired(n_keys);
  device::zero(execution, sums.data(), sums.bytes());
  device::zero(execution, fired.data(), fired.bytes());
  const std::int64_t largest_own = grid.shape().largest_part(batch_tokens);
  const device::Buffer<float> reconstruction(largest_own * width);

  dataset::StoredOrder rows(description, batch_tokens, grid, 1);
  run::Pass pass("evaluation", rows.n_batches(), "batches");
  for (std::int64_t i = 0; i < rows.n_batches(); ++i) {
    if (before_batch) before_batch();
    const dataset::RawBatch& batch = rows.read(i);
    forward.load(batch);
    forward.encode();
    forward.by_feature();
    kernels::accumulate_firing(execution, forward.hits(), fired.array());
    forward.decode([&](const Forward::OwnPart& part) {
      const std::int64_t first = part.layers.begin * shape.d_model, columns = part.layers.size() * shape.d_model;
      const auto of_layers = [&](auto* all) {
        return kernels::Array<std::remove_pointer_t<decltype(all)>>{all + first, columns};
      };
      const kernels::Matrix<float> y{reconstruction.data(), part.count, columns, columns};
      kernels::reconstruct(execution, part.partial, part.n_parts, of_layers(model.decoder_bias().weight.data), y);
      kernels::accumulate_dimensions(
          execution, batch.targets.rows_from(part.begin, part.count).columns_from(first, columns),
          {y.data, kernels::Scalar::fp32, part.count, columns, columns}, of_layers(normalisation.target_mean.data()),
          of_layers(normalisation.target_spread.data()), of_layers(normalisation.pivot.data()),
          {of_layers(sums.data()), of_layers(sums.data() + width), of_layers(sums.data() + 2 * width),
           of_layers(sums.data() + 3 * width)});
    });
    kernels::fence(execution);  // wait: the next batch overwrites this one
    pass.done(i + 1);
  }
  forward.require_valid_selections("of the evaluation");

  std::vector<double> total = to_host(execution, sums);
  world.all().sum(std::span<double>(total));
  std::vector<std::int64_t> firings = to_host(execution, fired);
  grid.axis(parallel::kDataAxis)
      .sum(std::span<std::int64_t>(firings));  // sum over all tokens, for this rank's features

  // Counts by layer: features by density, and entries.
  const std::int64_t tokens = description.n_rows;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(shape.n_layers * (kDensityBins + 1)), 0);
  if (grid.index(parallel::kDataAxis) == 0)
    for (std::int64_t i = 0; i < n_keys; ++i) {
      std::int64_t* const layer = counts.data() + i / model.n_local() * (kDensityBins + 1);
      ++layer[density_bin(firings[static_cast<std::size_t>(i)], tokens)];
      layer[kDensityBins] += firings[static_cast<std::size_t>(i)];
    }
  world.all().sum(std::span<std::int64_t>(counts));

  std::vector<float> inverse_deviation = to_host(execution, normalisation.standardise);
  const std::vector<float> spread = to_host(execution, normalisation.target_spread);
  for (std::size_t i = 0; i < inverse_deviation.size(); ++i) inverse_deviation[i] /= spread[i];

  EvaluationResult result;
  result.tokens = tokens;
  const double n = static_cast<double>(tokens);
  double all_errors = 0, all_totals = 0, all_variances = 0, all_standard_errors = 0, all_standard_totals = 0;
  for (std::int64_t layer = 0; layer < shape.n_layers; ++layer) {
    double error = 0, variance_error = 0, spread_total = 0, standard_error = 0, standard_total = 0, by_dimension = 0;
    std::int64_t varying = 0;
    for (std::int64_t i = layer * shape.d_model; i < (layer + 1) * shape.d_model; ++i) {
      const auto sum = [&](std::int64_t row) { return total[static_cast<std::size_t>(row * width + i)]; };
      const double sse = sum(1), sst = about_mean(sum(2), sum(3), n);
      if (!std::isfinite(sse) || !std::isfinite(sst))
        throw collective_error(ExitCode::numeric,
                               "the reconstruction of layer {} of {} is not finite (the activations are); lower "
                               "optimizer.learning_rate, or use device.precision = \"fp32\"",
                               layer, description.path);
      const double weight = static_cast<double>(inverse_deviation[static_cast<std::size_t>(i)]);
      error += sse;
      variance_error += std::max(0.0, sse - sum(0) * sum(0) / n);
      spread_total += sst;
      standard_error += sse * weight * weight;
      standard_total += sst * weight * weight;
      if (sst > 0) {
        by_dimension += sse / sst;
        ++varying;
      }
    }
    result.nmse.push_back(ratio(error, spread_total));
    result.nmse_standardised.push_back(ratio(standard_error, standard_total));
    result.explained_variance.push_back(1.0 - ratio(variance_error, spread_total));
    result.fvu_dimension.push_back(ratio(by_dimension, static_cast<double>(varying)));
    const std::int64_t* const layer_counts = counts.data() + layer * (kDensityBins + 1);
    result.density_histogram.emplace_back(layer_counts, layer_counts + kDensityBins);
    result.dead_fraction.push_back(static_cast<double>(layer_counts[0]) / static_cast<double>(shape.n_features));
    result.l0.push_back(static_cast<double>(layer_counts[kDensityBins]) / n);
    all_errors += error;
    all_totals += spread_total;
    all_variances += variance_error;
    all_standard_errors += standard_error;
    all_standard_totals += standard_total;
  }
  result.nmse_pooled = ratio(all_errors, all_totals);
  result.nmse_standardised_pooled = ratio(all_standard_errors, all_standard_totals);
  result.explained_variance_pooled = 1.0 - ratio(all_variances, all_totals);
  return result;
}

std::int64_t evaluation_device_bytes(const Shape& shape, const parallel::GridShape& grid, std::int64_t batch_tokens) {
  const std::int64_t features = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  return 8 * (4 * shape.width() + shape.n_layers * features) + 4 * grid.largest_part(batch_tokens) * shape.width();
}

void warn_of_constant_layers(const dataset::Description& description, const EvaluationResult& result) {
  for (std::size_t layer = 0; layer < result.nmse_standardised.size(); ++layer)
    if (std::isnan(result.nmse_standardised[layer]))
      log::warning(
          "{}: the targets of layer {} are constant here or in the training data (no variance to explain); left out of "
          "the means",
          description.path, layer);
}

}  // namespace weft::transcoder

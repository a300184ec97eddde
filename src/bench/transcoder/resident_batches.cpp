// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/resident_batches.hpp"

#include <algorithm>
#include <cmath>
#include <thread>

#include "device/stream.hpp"
#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/random.hpp"

namespace weft::bench {
namespace {

constexpr std::int64_t kActive = 16;   // planted features per token and layer
constexpr std::int64_t kSample = 512;  // tokens for the statistics
constexpr float kNoise = 0.1f;         // relative to a signal of about 1 per dimension

/// Streams of the generator's `step`.
enum class Stream : std::uint64_t { choice, input_noise, target_noise, input_direction, target_direction };

kernels::Random4 draw(std::uint64_t seed, Stream stream, std::uint64_t index) {
  return kernels::philox(seed, kernels::Purpose::benchmark, static_cast<std::uint64_t>(stream), index);
}

/// Gives each thread its part of n items.
template <class Work>
void in_parts(std::int64_t n, int n_threads, const Work& work) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < n_threads; ++i)
    threads.emplace_back([&work, part = parallel::part(n, n_threads, i)] { work(part); });
}

/// Directions of every layer and the popularity of each.
class Planted {
 public:
  Planted(const transcoder::Shape& shape, double zipf, std::uint64_t seed, int n_threads)
      : n_layers_(shape.n_layers), d_(shape.d_model), n_planted_(2 * shape.d_model), seed_(seed) {
    double sum = 0;
    for (std::int64_t i = 0; i < n_planted_; ++i) {
      sum += std::pow(static_cast<double>(i + 1), -zipf);
      popularity_.push_back(sum);
    }
    for (double& value : popularity_) value /= sum;
    fill(inputs_, Stream::input_direction, n_threads);
    fill(targets_, Stream::target_direction, n_threads);
  }

  /// Rows `begin` to `end` of inputs or targets, [tokens, L * d].
  void rows(bool targets, std::int64_t begin, std::int64_t end, float* to) const {
    const std::vector<float>& directions = targets ? targets_ : inputs_;
    const Stream noise = targets ? Stream::target_noise : Stream::input_noise;
    const std::uint64_t groups = static_cast<std::uint64_t>((d_ + 3) / 4);
    for (std::int64_t token = begin; token < end; ++token)
      for (std::int64_t layer = 0; layer < n_layers_; ++layer, to += d_) {
        const std::uint64_t place = static_cast<std::uint64_t>(token * n_layers_ + layer);
        for (std::uint64_t group = 0; group < groups; ++group) {
          const kernels::Random4 random = draw(seed_, noise, place * groups + group);
          for (std::uint64_t i = 0; i < 4 && group * 4 + i < static_cast<std::uint64_t>(d_); ++i)
            to[group * 4 + i] = kNoise * 3.4641f * (kernels::uniform_float(random.word[i]) - 0.5f);
        }
        for (std::uint64_t i = 0; i < kActive; ++i) {
          const kernels::Random4 random = draw(seed_, Stream::choice, place * kActive + i);
          const double u = kernels::uniform_double(random.word[0], random.word[1]);
          const std::int64_t feature = std::min<std::int64_t>(
              n_planted_ - 1, std::upper_bound(popularity_.begin(), popularity_.end(), u) - popularity_.begin());
          const float code = 1.0f + 0.5f * kernels::uniform_float(random.word[2]);
          const float* direction = directions.data() + (layer * n_planted_ + feature) * d_;
          for (std::int64_t c = 0; c < d_; ++c) to[c] += code * direction[c];
        }
      }
  }

 private:
  /// Normal numbers that make a sum of kActive directions about 1 per dimension.
  void fill(std::vector<float>& directions, Stream stream, int n_threads) const {
    directions.resize(static_cast<std::size_t>(n_layers_ * n_planted_ * d_));
    in_parts(n_layers_ * n_planted_ * d_, n_threads, [&](const parallel::Range part) {
      for (std::size_t i = static_cast<std::size_t>(part.begin); i < static_cast<std::size_t>(part.end); ++i)
        directions[i] = static_cast<float>(kernels::normal(draw(seed_, stream, i)) / std::sqrt(1.0 * kActive));
    });
  }

  std::int64_t n_layers_, d_, n_planted_;
  std::uint64_t seed_;
  std::vector<double> popularity_;       // cumulative
  std::vector<float> inputs_, targets_;  // [L, n_planted, d]
};

dataset::SideStatistics side_statistics(const std::vector<float>& rows, std::int64_t n_layers, std::int64_t width) {
  dataset::SideStatistics side;
  const std::size_t columns = static_cast<std::size_t>(width), n = rows.size() / columns;
  std::vector<double> sum(columns, 0), squares(columns, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    sum[i % columns] += static_cast<double>(rows[i]);
    squares[i % columns] += static_cast<double>(rows[i]) * static_cast<double>(rows[i]);
  }
  side.mean_norm.assign(static_cast<std::size_t>(n_layers), 0);
  for (std::size_t c = 0; c < columns; ++c) {
    const double mean = sum[c] / static_cast<double>(n);
    side.mean.push_back(mean);
    side.standard_deviation.push_back(
        std::sqrt(std::max(0.0, squares[c] - mean * sum[c]) / static_cast<double>(n - 1)));
    // The root mean square norm: near enough to the mean norm for a benchmark.
    side.mean_norm[c * static_cast<std::size_t>(n_layers) / columns] += squares[c] / static_cast<double>(n);
  }
  for (double& norm : side.mean_norm) norm = std::sqrt(norm);
  return side;
}

}  // namespace

ResidentBatches::ResidentBatches(const transcoder::Shape& shape, std::int64_t n_tokens, std::int64_t n_batches,
                                 double zipf, std::uint64_t seed, const parallel::Grid& grid,
                                 const kernels::Execution& execution, int n_threads)
    : n_layers_(shape.n_layers), d_model_(shape.d_model) {
  const Planted planted(shape, zipf, seed, n_threads);
  const std::int64_t width = shape.width();
  const auto resident = [&](bool targets, std::int64_t begin, std::int64_t n_rows) -> kernels::AnyMatrix {
    std::vector<float> rows(static_cast<std::size_t>(n_rows * width));
    const bool narrow = device::is_asynchronous(execution);
    std::vector<kernels::bf16> narrowed(narrow ? rows.size() : 0);
    in_parts(n_rows, n_threads, [&](const parallel::Range part) {
      float* const first = rows.data() + part.begin * width;
      planted.rows(targets, begin + part.begin, begin + part.end, first);
      if (narrow)
        std::transform(first, first + part.size() * width, narrowed.data() + part.begin * width, kernels::to_bf16);
    });
    const kernels::Scalar type = narrow ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
    const std::int64_t bytes = n_rows * width * kernels::bytes_of(type);
    memory_.emplace_back(std::max<std::int64_t>(1, bytes));
    device::copy(execution, memory_.back().data(), narrow ? static_cast<const void*>(narrowed.data()) : rows.data(),
                 bytes, device::Direction::to_device);
    kernels::fence(execution);
    return {memory_.back().data(), type, n_rows, width, width};
  };
  const parallel::Range own = grid.own_part(n_tokens);
  for (std::int64_t i = 0; i < n_batches; ++i) {
    dataset::RawBatch batch;
    batch.inputs = resident(false, i * n_tokens + own.begin, own.size());
    batch.targets = resident(true, i * n_tokens + own.begin, own.size());
    batch.n_tokens = n_tokens;
    batch.resident = true;
    batches_.push_back(batch);
  }
  std::vector<float> sample(static_cast<std::size_t>(kSample * width));
  statistics_.n_rows = kSample;
  planted.rows(false, 0, kSample, sample.data());
  statistics_.inputs = side_statistics(sample, shape.n_layers, width);
  planted.rows(true, 0, kSample, sample.data());
  statistics_.targets = side_statistics(sample, shape.n_layers, width);
}

dataset::Normalisation ResidentBatches::normalisation() const {
  const auto affine = [](const dataset::SideStatistics& side) {
    dataset::Affine out;
    for (std::size_t i = 0; i < side.mean.size(); ++i) {
      out.mean.push_back(static_cast<float>(side.mean[i]));
      out.scale.push_back(static_cast<float>(1.0 / (side.standard_deviation[i] + 1e-6)));
    }
    return out;
  };
  return {affine(statistics_.inputs), affine(statistics_.targets)};
}

}  // namespace weft::bench

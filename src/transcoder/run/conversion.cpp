// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/conversion.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <span>

#include "base/error.hpp"
#include "dataset/activations/stored_order.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "run/pass.hpp"

namespace weft::transcoder {
namespace {

/// Factor of the least wanted value that gives the lower bound of collected values. The (K+1)-th value is above this
/// bound, unless the values are far apart.
constexpr float kMargin = 0.9f;
/// Shift that groups positive values by their upper 16 bits: a relative resolution of 2^-7.
constexpr int kSizeShift = 16;
constexpr std::size_t kSizes = (kernels::kLargestKey >> kSizeShift) + 1;
/// Shares of the kept values that may lie below the floor of a group, tried one after the other.
constexpr std::array<double, 4> kShares = {0.5, 0.1, 0.01, 0};
constexpr std::int64_t kMostEntries = std::int64_t{1} << 30;
constexpr std::int64_t kPieceElements = std::int64_t{1} << 22;
/// Room for active features per token and layer: in the first attempt, in multiples of k, and in the result, in
/// multiples of the need of the densest batch. At least kLeastRoom, because the average over few tokens varies.
constexpr double kFirstRoom = 4, kRoom = 2;
constexpr std::int64_t kLeastRoom = 64;

float rounded(float value) { return kernels::to_bf16(value); }

template <class T>
std::vector<T> to_host(const kernels::Execution& execution, const T* data, std::int64_t n) {
  std::vector<T> values(static_cast<std::size_t>(n));
  device::copy(execution, values.data(), data, n * static_cast<std::int64_t>(sizeof(T)), device::Direction::to_host);
  kernels::fence(execution);
  return values;
}

void to_device(const kernels::Execution& execution, float* to, const std::vector<float>& values) {
  device::copy(execution, to, values.data(), std::ssize(values) * 4, device::Direction::to_device);
  kernels::fence(execution);
}

/// Receives keys and values of the entries that are active on this rank, batch by batch.
using Visit = std::function<void(std::span<const std::uint32_t> keys, std::span<const float> values)>;

/// Visits the batches of a data set. False if a batch had more active features than there is room for on some rank:
/// then the rest was not visited. Collective.
bool for_each_batch(const dataset::Description& description, Forward& forward, const parallel::Grid& grid,
                    const kernels::Execution& execution, std::int64_t batch_tokens, const Visit& visit) {
  dataset::StoredOrder rows(description, batch_tokens, grid, 1);
  run::Pass pass("encoding the data", rows.n_batches(), "batches");
  for (std::int64_t i = 0; i < rows.n_batches(); ++i) {
    forward.load(rows.read(i));
    forward.encode();
    if (!forward.selections_are_valid()) return false;
    const kernels::SparseActivations& a = forward.activations();
    const std::int64_t n = to_host(execution, a.row_offsets.data + a.n_tokens, 1).front();
    visit(to_host(execution, a.key.data, n), to_host(execution, a.value.data, n));
    pass.done(i + 1);
  }
  return true;
}

/// Values of one group: those of several features.
using Values = std::vector<std::span<const float>>;

/// Returns the rank-th largest value of all ranks; 0 if there are fewer. The bits of positive numbers have the order of
/// the numbers: counts by the upper bits give those of the result, counts by the lower ones among these the rest.
/// Collective.
float largest(const parallel::Communicator& world, const Values& all, std::int64_t rank) {
  std::uint32_t upper = 0, key = 0;
  for (const bool lower : {false, true}) {
    std::vector<std::int64_t> counts(std::size_t{1} << kSizeShift, 0);
    for (const std::span<const float> values : all)
      for (const float value : values) {
        const std::uint32_t bits = kernels::float_bits(value);
        if (!lower)
          ++counts[bits >> kSizeShift];
        else if (bits >> kSizeShift == upper)
          ++counts[bits & 0xffff];
      }
    world.sum(std::span<std::int64_t>(counts));
    std::size_t at = counts.size();
    while (at > 0 && (rank -= counts[at - 1]) > 0) --at;
    if (at == 0) return 0;
    rank += counts[at - 1];
    if (!lower) upper = static_cast<std::uint32_t>(at - 1);
    key = upper << kSizeShift | static_cast<std::uint32_t>(at - 1);
  }
  return kernels::bits_float(key);
}

}  // namespace

void round_to_bf16(const Model& model, const kernels::Execution& execution) {
  const auto round_vector = [&](kernels::Array<float> vector) { kernels::round_to_bf16(execution, vector); };
  for (const kernels::ParameterVector& bias : model.encoder_bias()) round_vector(bias.weight);
  round_vector(model.decoder_bias().weight);
  for (const auto matrices : {model.encoder(), model.decoder(), model.skip()})
    for (const kernels::ParameterRows& matrix : matrices) {
      if (matrix.storage != kernels::StorageType::fp32) continue;  // stored as bf16
      const std::int64_t most = std::max<std::int64_t>(1, kPieceElements / matrix.columns);
      const device::Buffer<float> piece(std::min(most, matrix.rows) * matrix.columns);
      for (std::int64_t row = 0; row < matrix.rows; row += most) {
        const std::int64_t count = std::min(most, matrix.rows - row);
        const kernels::Matrix<float> rows{piece.data(), count, matrix.columns, matrix.columns};
        kernels::weights_to_float(execution, matrix, row, rows);
        round_vector({piece.data(), count * matrix.columns});
        kernels::weights_from_float(execution, matrix, row, rows);
      }
      kernels::fence(execution);  // `piece` is destroyed
    }
  kernels::fence(execution);
}

Configuration finetuning(Configuration trained, std::int64_t from, std::int64_t steps) {
  ModelSettings& model = trained.transcoder;
  model.activation = Activation::batch_topk;
  model.encoder_bias_initial = EncoderBiasInitial::zero;
  model.k_initial = model.sparsity_begin = model.sparsity_end = 0;  // what changes over a run has its last value
  model.resample_every = 0;
  trained.run.steps = from + steps;
  optimizer::Settings& optimizer = trained.optimizer;
  optimizer.schedule = optimizer::Schedule::linear;
  optimizer.warmup_steps = optimizer.schedule_steps = 0;
  optimizer.warmup_fraction = optimizer.final_fraction = 0;
  optimizer.decay_begin = static_cast<double>(from) / static_cast<double>(trained.run.steps);
  return trained;
}

float threshold_between(float dropped, float kept, bool bf16) {
  const auto below = [&](float value) {  // returns the next lower number of the type
    if (!bf16) return kernels::bits_float(kernels::float_bits(value) - 1);
    const kernels::bf16 near = kernels::to_bf16(value);
    return near < value ? near : kernels::bits_float((static_cast<std::uint32_t>(near.bits) - 1) << 16);
  };
  const float middle = dropped + (kept - dropped) / 2;
  const float candidate = bf16 ? rounded(middle) : middle;
  return candidate < kept ? candidate : below(kept);
}

Calibrated calibrate(const Conversion& conversion, const dataset::Description& description,
                     const ModelSettings& trained, const Model& model, Forward& counting,
                     const JumpingPass& jumping_with, const parallel::Grid& grid, const kernels::Execution& execution,
                     std::int64_t batch_tokens) {
  const std::int64_t n_layers = model.shape().n_layers, n_local = model.n_local(), n_features = trained.features;
  const auto layer_of = [&](std::size_t key) { return key / static_cast<std::size_t>(n_local); };
  const bool together = trained.scope == Scope::all_layers;
  const auto n_groups = static_cast<std::size_t>(together ? 1 : n_layers);
  const auto group_of = [&](std::size_t key) { return together ? 0 : layer_of(key); };
  const parallel::Communicator& world = grid.world();

  // 1. Collect what the training activation keeps: number of entries and least value of each feature; the number in
  // each
  //    group, by the upper bits of the value.
  std::vector<std::int64_t> fired(static_cast<std::size_t>(n_layers * n_local), 0), kept(n_groups, 0),
      by_size(n_groups * kSizes, 0);
  std::vector<float> least(fired.size(), std::numeric_limits<float>::infinity());
  const bool counted = for_each_batch(description, counting, grid, execution, batch_tokens,
                                      [&](std::span<const std::uint32_t> keys, std::span<const float> values) {
                                        for (std::size_t j = 0; j < keys.size(); ++j) {
                                          const std::size_t key = keys[j], g = group_of(key);
                                          ++fired[key];
                                          ++kept[g];
                                          ++by_size[g * kSizes + (kernels::float_bits(values[j]) >> kSizeShift)];
                                          least[key] = std::min(least[key], values[j]);
                                        }
                                      });
  if (!counted) counting.require_valid_selections("of the calibration");
  world.sum(std::span<std::int64_t>(kept));
  world.sum(std::span<std::int64_t>(by_size));

  // 2. Collect all values above a floor, with as much room as the densest batch needs. Of a group with K kept entries
  // the K-th
  //    largest value is at least the least that was kept. With topk, where each token keeps its own, it is far above
  //    that: a floor above a share of the kept values also suffices if more than K values exceed it. A feature
  //    with a threshold of its own also needs its values down to the least that was kept.
  std::vector<std::size_t> share(n_groups, trained.activation == Activation::topk ? 0 : kShares.size() - 1);
  std::vector<float> floor(n_groups);
  const auto set_floor = [&](std::size_t g) {
    const auto* const sizes = by_size.data() + g * kSizes;
    auto below = static_cast<std::int64_t>(kShares[share[g]] * static_cast<double>(kept[g]));
    std::size_t size = 0;
    while (size + 1 < kSizes && (below -= sizes[size]) >= 0) ++size;
    const float edge = kernels::bits_float(static_cast<std::uint32_t>(size) << kSizeShift);
    floor[g] = std::max(edge * kMargin, std::numeric_limits<float>::min());
  };
  for (std::size_t g = 0; g < n_groups; ++g) set_floor(g);
  const kernels::AnyMatrix thresholds = model.thresholds();
  std::vector<float> theta(fired.size());
  std::vector<std::vector<float>> values(theta.size());
  std::int64_t entries = 0;
  const auto collect = [&](std::span<const std::uint32_t> keys, std::span<const float> of_batch) {
    entries += std::ssize(keys);
    if (entries > kMostEntries)
      throw error(ExitCode::usage,
                  "{}: more than {} activations on a rank (the calibration holds them in memory); give less data, or "
                  "take more ranks",
                  description.path, kMostEntries);
    for (std::size_t j = 0; j < keys.size(); ++j) values[keys[j]].push_back(of_batch[j]);
  };
  std::int64_t capacity =
      std::min(n_features, std::max<std::int64_t>(kLeastRoom, std::llround(kFirstRoom * trained.k)));
  std::unique_ptr<Pass> jumping = jumping_with(capacity);
  const auto collect_all = [&] {
    for (std::size_t key = 0; key < theta.size(); ++key) {
      theta[key] = floor[group_of(key)];
      if (conversion.per_feature) theta[key] = std::min(theta[key], kMargin * least[key]);
      values[key].clear();
    }
    entries = 0;
    to_device(execution, static_cast<float*>(thresholds.data), theta);
    return for_each_batch(description, jumping->forward, grid, execution, batch_tokens, collect);
  };
  for (bool lower = true; lower;) {
    while (!collect_all()) {
      if (capacity == n_features)
        jumping->forward.require_valid_selections("of the calibration");  // there was room for all
      capacity = std::min(n_features, 2 * capacity);
      jumping.reset();
      jumping = jumping_with(capacity);
    }
    std::vector<std::int64_t> above(n_groups, 0);
    for (std::size_t key = 0; key < values.size(); ++key)
      above[group_of(key)] +=
          std::count_if(values[key].begin(), values[key].end(), [&](float v) { return v > floor[group_of(key)]; });
    world.sum(std::span<std::int64_t>(above));
    lower = false;
    for (std::size_t g = 0; g < n_groups; ++g)
      if (above[g] <= kept[g] && share[g] + 1 < kShares.size()) {
        ++share[g];
        set_floor(g);
        lower = true;
      }
  }

  // 3. Set the thresholds.
  std::vector<float> of_group;
  for (std::size_t g = 0; g < n_groups; ++g) {
    Values all;
    for (std::size_t key = 0; key < values.size(); ++key)
      if (group_of(key) == g) all.emplace_back(values[key]);
    const float last = largest(world, all, kept[g]), next = largest(world, all, kept[g] + 1);
    of_group.push_back(kept[g] > 0 ? threshold_between(std::max(next, floor[g]), last, conversion.bf16)
                                   : std::numeric_limits<float>::max());
  }
  for (std::size_t key = 0; key < theta.size(); ++key) {
    const std::size_t g = group_of(key);
    theta[key] = of_group[g];
    const auto n = static_cast<std::size_t>(fired[key]);
    std::vector<float>& own = values[key];
    if (!conversion.per_feature || n == 0 || own.size() < n) continue;
    const auto last = own.begin() + static_cast<std::ptrdiff_t>(n) - 1;
    std::nth_element(own.begin(), last, own.end(), std::greater<>());
    const float dropped =
        own.size() > n ? *std::max_element(last + 1, own.end()) : std::min(floor[g], kMargin * least[key]);
    theta[key] = threshold_between(dropped, own[n - 1], conversion.bf16);
  }
  to_device(execution, static_cast<float*>(thresholds.data), theta);

  // 4. Count the features that are active with them.
  std::int64_t fullest = 0;
  const auto count = [&](std::span<const std::uint32_t> keys, std::span<const float>) {
    fullest = std::max(fullest, std::ssize(keys));
  };
  if (!for_each_batch(description, jumping->forward, grid, execution, batch_tokens, count))
    jumping->forward.require_valid_selections("of the calibration");  // thresholds are not below the collected values
  world.maximum(std::span<std::int64_t>(&fullest, 1));
  const double active = static_cast<double>(fullest * world.size()) /
                        static_cast<double>(std::min(batch_tokens, description.n_rows) * n_layers);
  const double room = std::max<double>(kLeastRoom, std::ceil(kRoom * active));
  return {std::move(jumping), active, std::min(n_features, static_cast<std::int64_t>(room))};
}

}  // namespace weft::transcoder

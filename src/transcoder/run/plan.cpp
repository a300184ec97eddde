// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/plan.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/format.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "dataset/activations/loader.hpp"
#include "kernels/slow_paths.hpp"
#include "privacy/account.hpp"
#include "privacy/correlated_noise.hpp"
#include "transcoder/forward/normalisation.hpp"
#include "transcoder/private/records.hpp"
#include "transcoder/run/evaluation.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {
namespace {

std::int64_t total(const std::vector<std::pair<std::string, std::int64_t>>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& part) { return sum + part.second; });
}

/// Bytes that the largest rank sends per step. In a feature group it sends inputs and gradient rows to all ranks,
/// partial reconstructions to their owners; between groups it sends inputs, gradient rows, lists and new weights.
struct SentBytes {
  std::int64_t feature = 0, data = 0;
  std::int64_t total() const { return feature + data; }
};

SentBytes sent_bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  const FeatureAxisSizes sizes(configuration, shape, grid, configuration.data.batch_tokens);
  const std::int64_t row = sizes.bytes(sizes.width);
  // Dead features have partial reconstructions and gradient rows of their own.
  const std::int64_t decoded = backward_batches(configuration.transcoder);
  return {decoded * (sizes.group - sizes.own) * row +
              (1 + decoded) * sizes.own * (grid.size(parallel::kFeatureAxis) - 1) * row,
          DataAxis::sent_bytes(configuration, shape, grid)};
}

/// Memory of NCCL 2.28 for each communicator of n GPUs joined by NVLink, measured on 2 and 4 H200: 1.30 and 1.95 GiB.
std::int64_t connection_bytes(const parallel::GridShape& grid) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const auto communicator = [](std::int64_t n) { return n > 1 ? (665 + 333 * n) * kMiB : 0; };
  const bool both = grid.size(parallel::kDataAxis) > 1 && grid.size(parallel::kFeatureAxis) > 1;
  return communicator(grid.size(parallel::kFeatureAxis)) + communicator(grid.size(parallel::kDataAxis)) +
         (both ? communicator(grid.ranks()) : 0);
}

using Need = std::int64_t (*)(const Plan&);

std::int64_t device_need(const Plan& plan) { return plan.device_total(); }
/// Host memory of the run. Without a GPU, the memory that the plan lists under the device is host memory, too.
std::int64_t host_need(const Plan& plan) { return plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()); }

/// Returns the largest value of `number`, a member of `tried`, from `least` to its present value, with which the run
/// needs at most `available` bytes; 0 if there is none. The need of a run rises with features and tokens.
std::int64_t largest_that_fits(Configuration& tried, std::int64_t& number, std::int64_t least,
                               const dataset::Description& description, const parallel::GridShape& grid, Need need,
                               std::int64_t available) {
  std::int64_t fits = least - 1, too_large = number;
  while (too_large - fits > 1) {
    number = fits + (too_large - fits) / 2;
    (need(plan(tried, description, grid)) <= available ? fits : too_large) = number;
  }
  return fits < least ? 0 : fits;
}

/// Message for a run that does not fit, with the largest sizes that fit. `memory`: "of device memory".
std::string too_large(const Configuration& configuration, const dataset::Description& description,
                      const parallel::GridShape& grid, Need need, std::int64_t available, const std::string& memory) {
  Configuration fewer = configuration, smaller = configuration;
  const bool by_count = kernels::activation_keeps_k(configuration.transcoder.activation);
  const std::int64_t features =
      largest_that_fits(fewer, fewer.transcoder.features,
                        by_count ? std::max<std::int64_t>(1, std::llround(std::ceil(configuration.transcoder.k))) : 1,
                        description, grid, need, available);
  smaller.data.micro_tokens = 0;
  const std::int64_t tokens =
      largest_that_fits(smaller, smaller.data.batch_tokens, 1, description, grid, need, available);
  std::string suggestion;
  if (features > 0) suggestion = fmt::format("transcoder.features = {}", features);
  if (tokens > 0) suggestion += fmt::format("{}data.batch_tokens = {}", suggestion.empty() ? "" : ", or ", tokens);
  return fmt::format(
      "the run needs {} {} per rank, {} are available (transcoder.features = {}, data.batch_tokens = {}); {}",
      format::binary_bytes_text(need(plan(configuration, description, grid))), memory,
      format::binary_bytes_text(available), configuration.transcoder.features, configuration.data.batch_tokens,
      (suggestion.empty()
           ? "neither fewer features nor a smaller batch suffice: take more ranks or nodes, a smaller "
             "optimizer.state or data.window_rows"
           : "what fits: " + suggestion + "; or take more ranks or nodes, or a smaller optimizer.state") +
          (by_count ? "" : " or transcoder.capacity (0 is room for all features)") +
          (configuration.data.model.empty() ? "" : "; or divide data.model over more ranks (parallel.tensor)"));
}

/// The configuration of the steps: a private one has room for more records than it has on average.
Configuration of_steps(const Configuration& configuration, const dataset::Description& description,
                       const parallel::GridShape& grid) {
  if (!configuration.privacy.enabled) return configuration;
  return with_largest_batch(configuration, RecordTable(description, record_rows(configuration)).count(), grid.ranks());
}

/// Ratio of the bytes that a grid sends to those of the best grid above which advice is given.
constexpr double kNoticeably = 1.1;

}  // namespace

std::int64_t Plan::device_total() const { return total(device); }
std::int64_t Plan::host_total() const { return total(host); }

Plan plan(const Configuration& given, const dataset::Description& description, const parallel::GridShape& grid) {
  const Configuration configuration = of_steps(given, description, grid);
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  Plan plan;
  plan.shape = shape_of(configuration.transcoder, description.n_layers, description.d_model);
  plan.grid = grid;
  const Shape& shape = plan.shape;
  const kernels::StorageType storage = configuration.optimizer.state;
  const std::int64_t rows = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)),
                     owned = parallel::largest_part(rows, grid.size(parallel::kDataAxis));
  const std::int64_t batch = configuration.data.batch_tokens,
                     group = parallel::largest_part(batch, grid.size(parallel::kDataAxis));
  const std::int64_t width = shape.width();
  const std::vector<model::ParameterSpec> parameters = parameter_specs(shape);
  const model::StateBytes state = model::largest_state_bytes(parameters, grid, storage, backend, Moments::held);
  plan.device = {{"weights", state.weights},
                 {"moments", state.moments},
                 {"dead-feature clocks", state.row_state},
                 {"conversion of weights", state.conversion}};
  plan.device.emplace_back("normalisation", NormalisationOnDevice::bytes(width));
  const bool is_private = configuration.privacy.enabled;
  const model::StepArena step = measure_step(configuration, shape, grid, description.row_bytes(), backend);
  for (const model::StepArena::Bytes& bytes : step.bytes()) plan.device.emplace_back(bytes.purpose, bytes.device);
  if (is_private)
    plan.device.emplace_back("noise of earlier steps",
                             privacy::CorrelatedNoise::bytes(parameters, configuration.privacy.bands, grid, 0));
  if (configuration.data.validates())
    plan.device.emplace_back("evaluation", evaluation_device_bytes(shape, grid, batch));
  plan.device.emplace_back("language model", description.source_bytes);
  plan.device.emplace_back("CUDA context and libraries", kernels::kCudaBuild ? kContextBytes : 0);
  plan.device.emplace_back("connections between GPUs", kernels::kCudaBuild ? connection_bytes(grid) : 0);
  // Private steps read the rows of their records when they need them.
  plan.host = {{"data loader", is_private ? 2 * grid.largest_part(batch) * description.row_bytes()
                                          : dataset::loader_memory(description, configuration.data, grid).total()},
               {"step staging", step.host_bytes()}};
  // The loader is destroyed after the last step.
  if (configuration.data.validates() && configuration.log.evaluate_every > 0)
    plan.host.emplace_back("evaluation", 2 * grid.largest_part(batch) * description.row_bytes());
  plan.checkpoint_bytes = model::checkpoint_bytes(parameters, storage);
  if (is_private)
    plan.checkpoint_bytes += privacy::CorrelatedNoise::bytes(parameters, configuration.privacy.bands, {}, 0);
  plan.disk_bytes = (configuration.checkpoint.kept() + 1) * plan.checkpoint_bytes;
  if (configuration.checkpoint.staging == checkpoint::Staging::full)
    plan.host.emplace_back("checkpoint staging", plan.checkpoint_bytes / (grid.ranks()));

  plan.read_bytes_per_step = 2 * batch * description.row_bytes();
  plan.optimizer_bytes_per_step =
      2 *
      (state.moments + state.weights * owned / std::max<std::int64_t>(1, rows));  // each is read once and written once
  const SentBytes sent = sent_bytes(configuration, shape, grid);
  plan.feature_bytes_per_step = sent.feature;
  plan.data_bytes_per_step = sent.data;
  const std::int64_t world = grid.ranks();
  for (std::int64_t groups = 1; groups <= world; ++groups) {
    if (world % groups != 0) continue;
    const parallel::GridShape other = parallel::data_by_feature(groups, world / groups);
    const SentBytes there = sent_bytes(configuration, shape, other);
    if (groups > 1 && there.total() >= plan.quietest_bytes_per_step) continue;
    plan.quietest = other;
    plan.quietest_bytes_per_step = there.total();
  }
  plan.encoder_flops_per_step =
      2.0 * static_cast<double>(group) * static_cast<double>(rows) * static_cast<double>(width);
  plan.steps_per_epoch = static_cast<double>(description.n_rows) / static_cast<double>(given.data.batch_tokens);
  return plan;
}

std::int64_t micro_tokens_that_fit(const Configuration& configuration, const dataset::Description& description,
                                   const parallel::GridShape& grid, std::int64_t available) {
  constexpr std::int64_t kFewest = 64;
  Configuration tried = configuration;
  const auto total = [&] { return plan(tried, description, grid).device_total(); };
  if (total() <= available) return configuration.data.micro_tokens;
  if (configuration.data.micro_tokens == 0)
    for (tried.data.micro_tokens =
             parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis));
         tried.data.micro_tokens > kFewest;) {
      tried.data.micro_tokens = std::max(kFewest, tried.data.micro_tokens / 2);
      if (total() <= available) return tried.data.micro_tokens;
    }
  throw Error(ExitCode::usage, too_large(configuration, description, grid, device_need, available, "of device memory"),
              KnownTo::all_ranks);
}

std::string lacks_host_memory(const Configuration& configuration, const dataset::Description& description,
                              const parallel::GridShape& grid, std::int64_t available, const std::string& limit) {
  if (available == 0 || host_need(plan(configuration, description, grid)) <= available) return {};
  return too_large(configuration, description, grid, host_need, available, fmt::format("of host memory ({})", limit));
}

std::string private_text(const Configuration& configuration, const dataset::Description& train) {
  const std::int64_t rows = record_rows(configuration);
  if (train.n_rows == 0) return {};
  const RecordTable records(train, rows);
  privacy::require_parts(configuration.privacy, sample_rate(configuration, records));
  privacy::require_count_noise(configuration.privacy, configuration.privacy.noise_multiplier,
                               expected_records(configuration));
  return fmt::format(
      "  private: {} records of at most {} row{}, each in a step with probability {:.4g}: {:g} expected\n",
      format::grouped(records.count()), rows, rows == 1 ? "" : "s", sample_rate(configuration, records),
      expected_records(configuration));
}

std::string grid_advice(const Plan& plan) {
  const std::int64_t here = plan.feature_bytes_per_step + plan.data_bytes_per_step;
  if (static_cast<double>(here) <= kNoticeably * static_cast<double>(plan.quietest_bytes_per_step)) return {};
  return fmt::format(
      "on a grid of {} each rank sends {} per step, on {} it would send {} (the feature axis "
      "moves tokens, the data axis moves weights); consider parallel.data = {}",
      plan.grid.text(), format::binary_bytes_text(here), plan.quietest.text(),
      format::binary_bytes_text(plan.quietest_bytes_per_step), plan.quietest.size(parallel::kDataAxis));
}

std::string slow_paths_text(const Shape& shape, kernels::Scalar type) {
  const std::string reason = kernels::slow_feature_rows(shape.d_model, type);
  if (reason.empty()) return {};
  return fmt::format(
      "  decode, backward passes and updates: kernels without vectors, several times slower, because of {}\n", reason);
}

std::string to_text(const Plan& plan, const Configuration& configuration) {
  const Shape& shape = plan.shape;
  std::string text = fmt::format("plan: {}, {:.1f} M parameters, grid {}\n", to_text(shape),
                                 static_cast<double>(shape.parameters()) * 1e-6, plan.grid.text());
  const auto row = [&](const std::string& name, const std::string& value) {
    text += fmt::format("  {:<34}{:>14}\n", name, value);
  };
  for (const auto& [name, bytes] : plan.device)
    if (bytes > 0) row(name, format::binary_bytes_text(bytes));
  row("on the device, per rank", format::binary_bytes_text(plan.device_total()));
  for (const auto& [name, bytes] : plan.host)
    if (bytes > 0) row(name, format::binary_bytes_text(bytes));
  row("on the host, per rank", format::binary_bytes_text(plan.host_total()));
  row("one checkpoint", format::binary_bytes_text(plan.checkpoint_bytes));
  row(fmt::format("checkpoints on disk, {} + 1", configuration.checkpoint.kept()),
      format::binary_bytes_text(plan.disk_bytes));
  row("read per step", format::binary_bytes_text(plan.read_bytes_per_step));
  row("optimizer traffic per step and rank", format::binary_bytes_text(plan.optimizer_bytes_per_step));
  if (plan.feature_bytes_per_step > 0)
    row("sent per step, feature axis", format::binary_bytes_text(plan.feature_bytes_per_step));
  if (plan.data_bytes_per_step > 0)
    row("sent per step, data axis", format::binary_bytes_text(plan.data_bytes_per_step));
  if (plan.grid.ranks() > 1)
    row(fmt::format("grid that sends least: {} x {}", plan.quietest.size(parallel::kDataAxis),
                    plan.quietest.size(parallel::kFeatureAxis)),
        format::binary_bytes_text(plan.quietest_bytes_per_step));
  row("encoder product per step and rank", fmt::format("{:.1f} GFLOP", plan.encoder_flops_per_step * 1e-9));
  if (device::planned_backend(device_settings(configuration)) == kernels::Backend::cuda)
    text += slow_paths_text(shape, scalar_of(configuration.precision));
  if (plan.steps_per_epoch <= 0) return text;
  row("steps per epoch", fmt::format("{:.1f}", plan.steps_per_epoch));
  row("epochs in this run", fmt::format("{:.2f}", static_cast<double>(configuration.run.steps) / plan.steps_per_epoch));
  return text;
}

}  // namespace weft::transcoder

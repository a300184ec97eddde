// SPDX-License-Identifier: Apache-2.0
#include "transcoder/plan.hpp"

#include <fmt/format.h>

#include <numeric>

#include "base/error.hpp"
#include "checkpoint/writer.hpp"
#include "dataset/activations/loader.hpp"
#include "report/format.hpp"
#include "transcoder/exchange/data_axis.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/trainer.hpp"

namespace weft::transcoder {
namespace {

std::int64_t total(const std::vector<std::pair<std::string, std::int64_t>>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& part) { return sum + part.second; });
}

struct StateBytes {
  std::int64_t weights = 0, moments = 0;
};

/// Parameters of `rows` features per layer, moments of `owned` of them.
StateBytes state_bytes(const Shape& shape, kernels::StatePolicy policy, std::int64_t rows, std::int64_t owned) {
  StateBytes bytes;
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    for (const std::int64_t columns : {shape.d_model, shape.decoder_columns(s)}) {
      bytes.weights += weight_bytes(policy, rows, columns);
      bytes.moments += moment_bytes(policy, owned, columns, shape.d_model);
    }
  bytes.weights += 4 * (shape.n_layers * rows + shape.width());
  bytes.moments += 8 * (shape.n_layers * owned + shape.width());
  return bytes;
}

/// What one rank sends in a step: inputs and gradient rows to all and partial reconstructions to their owners, in a
/// feature group; inputs, gradient rows, lists and new weights between groups.
struct SentBytes {
  std::int64_t feature = 0, data = 0;
};

SentBytes sent_bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis)),
                     own = parallel::largest_part(group, grid.size(parallel::kFeatureAxis)),
                     row = shape.width() * kernels::bytes_of(scalar_of(configuration.precision));
  return {(group - own) * row + 2 * own * (grid.size(parallel::kFeatureAxis) - 1) * row,
          DataAxis::sent_bytes(configuration, shape, grid)};
}

/// What NCCL 2.28 takes for each communicator of n GPUs joined by NVLink, measured on 2 and 4 H200: 1.30 and 1.95 GiB.
std::int64_t connection_bytes(const parallel::GridShape& grid) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const auto communicator = [](std::int64_t n) { return n > 1 ? (665 + 333 * n) * kMiB : 0; };
  const bool both = grid.size(parallel::kDataAxis) > 1 && grid.size(parallel::kFeatureAxis) > 1;
  return communicator(grid.size(parallel::kFeatureAxis)) + communicator(grid.size(parallel::kDataAxis)) +
         (both ? communicator(grid.ranks()) : 0);
}

/// A grid that sends this much more than the best is worth a word.
constexpr double kNoticeably = 1.1;

}  // namespace

std::int64_t Plan::device_total() const { return total(device); }
std::int64_t Plan::host_total() const { return total(host); }

Plan plan(const Configuration& configuration, const dataset::Description& description,
          const parallel::GridShape& grid) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  Plan plan;
  plan.shape = {description.n_layers, description.d_model, configuration.transcoder.features};
  plan.grid = grid;
  const Shape& shape = plan.shape;
  const kernels::StatePolicy policy = configuration.optimizer.state;
  const std::int64_t rows = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)),
                     owned = parallel::largest_part(rows, grid.size(parallel::kDataAxis));
  const std::int64_t batch = configuration.data.batch_tokens,
                     group = parallel::largest_part(batch, grid.size(parallel::kDataAxis));
  const std::int64_t width = shape.width();
  const SelectionSizes selection = selection_sizes(
      configuration.transcoder, selection_shape(configuration, shape, batch), grid, configuration.precision, backend);

  const StateBytes state = state_bytes(shape, policy, rows, owned);
  const std::int64_t clocks = 8 * shape.n_layers * owned;
  plan.device = {{"weights", state.weights},
                 {"moments", state.moments},
                 {"dead-feature clocks", clocks},
                 {"forward pass", Forward::bytes(configuration, shape, grid, batch, backend)},
                 {"backward pass", Trainer::bytes(configuration, shape, grid, description.row_bytes(), backend)},
                 {"lists of the data axis", DataAxis::bytes(configuration, shape, grid, backend)},
                 {"CUDA context and libraries", kernels::kCudaBuild ? kContextBytes : 0},
                 {"connections between GPUs", kernels::kCudaBuild ? connection_bytes(grid) : 0}};
  plan.host = {{"data loader", dataset::loader_memory(description, configuration.data, grid).total()},
               {"selection staging", selection.host_bytes + selection.rank_0_host_bytes}};
  const StateBytes whole = state_bytes(shape, policy, shape.n_features, shape.n_features);
  plan.checkpoint_bytes = whole.weights + whole.moments + 8 * shape.n_layers * shape.n_features;
  plan.disk_bytes = (configuration.checkpoint.keep + 1) * plan.checkpoint_bytes;
  if (configuration.checkpoint.staging == checkpoint::Staging::full)
    plan.host.emplace_back("checkpoint staging", plan.checkpoint_bytes / (grid.ranks()));

  plan.read_bytes_per_step = 2 * batch * description.row_bytes();
  plan.optimizer_bytes_per_step =
      2 * (state.moments + state.weights * owned / std::max<std::int64_t>(1, rows));  // read once, written once
  const SentBytes sent = sent_bytes(configuration, shape, grid);
  plan.feature_bytes_per_step = sent.feature;
  plan.data_bytes_per_step = sent.data;
  const std::int64_t world = grid.ranks();
  for (std::int64_t groups = 1; groups <= world; ++groups) {
    if (world % groups != 0) continue;
    const parallel::GridShape other = parallel::data_by_feature(groups, world / groups);
    const SentBytes there = sent_bytes(configuration, shape, other);
    if (groups > 1 && there.feature + there.data >= plan.quietest_bytes_per_step) continue;
    plan.quietest = other;
    plan.quietest_bytes_per_step = there.feature + there.data;
  }
  plan.encoder_flops_per_step =
      2.0 * static_cast<double>(group) * static_cast<double>(rows) * static_cast<double>(width);
  plan.steps_per_epoch = static_cast<double>(description.n_rows) / static_cast<double>(batch);
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
  const std::int64_t wanted = total();
  // Bytes rise with the batch.
  std::int64_t fits = 0, too_large = configuration.data.batch_tokens;
  while (too_large - fits > 1) {
    tried.data.batch_tokens = (fits + too_large) / 2;
    (total() <= available ? fits : too_large) = tried.data.batch_tokens;
  }
  throw collective_error(ExitCode::usage, "data.batch_tokens = {} needs {} on each device, {} are there; {}",
                         configuration.data.batch_tokens, report::binary_bytes_text(wanted),
                         report::binary_bytes_text(available),
                         fits > 0 ? fmt::format("the largest batch that fits is {} tokens", fits)
                                  : std::string("not even one token fits: take fewer transcoder.features, a smaller "
                                                "optimizer.state or more ranks"));
}

std::string grid_advice(const Plan& plan) {
  const std::int64_t here = plan.feature_bytes_per_step + plan.data_bytes_per_step;
  if (static_cast<double>(here) <= kNoticeably * static_cast<double>(plan.quietest_bytes_per_step)) return {};
  return fmt::format(
      "on a grid of {} each rank sends {} per step, on {} it would send {} (the feature axis "
      "moves tokens, the data axis moves weights); consider parallel.data = {}",
      plan.grid.text(), report::binary_bytes_text(here), plan.quietest.text(),
      report::binary_bytes_text(plan.quietest_bytes_per_step), plan.quietest.size(parallel::kDataAxis));
}

std::string to_text(const Plan& plan, const Configuration& configuration) {
  const Shape& shape = plan.shape;
  std::string text =
      fmt::format("plan: {} layers, d_model {}, {} features per layer, {:.1f} M parameters, grid {}\n", shape.n_layers,
                  shape.d_model, shape.n_features, static_cast<double>(shape.parameters()) * 1e-6, plan.grid.text());
  const auto row = [&](const std::string& name, const std::string& value) {
    text += fmt::format("  {:<34}{:>14}\n", name, value);
  };
  for (const auto& [name, bytes] : plan.device)
    if (bytes > 0) row(name, report::binary_bytes_text(bytes));
  row("on the device, per rank", report::binary_bytes_text(plan.device_total()));
  for (const auto& [name, bytes] : plan.host)
    if (bytes > 0) row(name, report::binary_bytes_text(bytes));
  row("on the host beside it, per rank", report::binary_bytes_text(plan.host_total()));
  row("one checkpoint", report::binary_bytes_text(plan.checkpoint_bytes));
  row(fmt::format("checkpoints on disk, {} + 1", configuration.checkpoint.keep),
      report::binary_bytes_text(plan.disk_bytes));
  row("read per step", report::binary_bytes_text(plan.read_bytes_per_step));
  row("optimizer traffic per step and rank", report::binary_bytes_text(plan.optimizer_bytes_per_step));
  if (plan.feature_bytes_per_step > 0)
    row("sent per step, feature axis", report::binary_bytes_text(plan.feature_bytes_per_step));
  if (plan.data_bytes_per_step > 0)
    row("sent per step, data axis", report::binary_bytes_text(plan.data_bytes_per_step));
  if (plan.grid.ranks() > 1)
    row(fmt::format("grid that sends least: {} x {}", plan.quietest.size(parallel::kDataAxis),
                    plan.quietest.size(parallel::kFeatureAxis)),
        report::binary_bytes_text(plan.quietest_bytes_per_step));
  row("encoder product per step and rank", fmt::format("{:.1f} GFLOP", plan.encoder_flops_per_step * 1e-9));
  if (plan.steps_per_epoch <= 0) return text;
  row("steps per epoch", fmt::format("{:.1f}", plan.steps_per_epoch));
  row("epochs in this run", fmt::format("{:.2f}", static_cast<double>(configuration.run.steps) / plan.steps_per_epoch));
  return text;
}

}  // namespace weft::transcoder

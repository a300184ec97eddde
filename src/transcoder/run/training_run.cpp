// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/training_run.hpp"

#include <algorithm>

#include "base/format.hpp"
#include "base/log.hpp"
#include "dataset/activations/describe.hpp"
#include "dataset/activations/reader.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "transcoder/run/initial_weights.hpp"
#include "transcoder/run/result.hpp"
#include "transcoder/run/statistics_state.hpp"
#include "transcoder/run/step_work.hpp"

namespace weft::transcoder {

Datasets describe_datasets(const dataset::Settings& settings, const parallel::World& world,
                           std::optional<Datasets> computed) {
  Datasets data = computed ? std::move(*computed) : Datasets{dataset::describe(world, settings.train, settings), {}};
  if (settings.validation.empty()) return data;
  data.validation = dataset::describe(world, settings.validation, settings);
  if (data.validation->n_layers != data.train.n_layers || data.validation->d_model != data.train.d_model)
    throw collective_error(
        ExitCode::data,
        "{} has {} layers and d_model {}, {} has {} and {} (both must come from one model); correct data.validation",
        data.validation->path, data.validation->n_layers, data.validation->d_model, data.train.path,
        data.train.n_layers, data.train.d_model);
  if (world.is_root() && data.validation->fingerprint == data.train.fingerprint)
    log::warning(
        "{}: data.validation has the activations of data.train (measures of them show what was learned by heart); "
        "take rows that are not trained on",
        data.validation->path);
  return data;
}

namespace {

/// The checkpoint whose statistics normalise the activations; null: those of the training data do. Weights apply to
/// activations that are normalised as in their own training.
const checkpoint::Found* source_of_statistics(const Configuration& configuration, const run::OpenedRun& opened,
                                              const std::optional<checkpoint::Found>& initial) {
  if (opened.found) return &*opened.found;
  return initial && configuration.data.normalise != dataset::Normalise::none ? &*initial : nullptr;
}

}  // namespace

TrainingRun::TrainingRun(const Configuration& configuration, const Datasets& data, const run::OpenedRun& opened,
                         const std::optional<checkpoint::Found>& initial, const parallel::World& world,
                         const parallel::Grid& grid, const device::Runtime& runtime)
    : configuration_(configuration),
      data_(data),
      initial_(initial),
      world_(world),
      grid_(grid),
      runtime_(runtime),
      statistics_(source_of_statistics(configuration, opened, initial) != nullptr
                      ? load_statistics(world, *source_of_statistics(configuration, opened, initial),
                                        data.train.n_layers, data.train.d_model, data.train.path, runtime.execution())
                      : dataset::statistics(world, data.train, (opened.directory.path / "statistics.txt").string(),
                                            runtime.threads(), configuration.data.statistics_rows)),
      trainer_(configuration, shape_of(configuration.transcoder, data.train.n_layers, data.train.d_model),
               dataset::normalisation(statistics_, data.train, configuration.data.normalise), statistics_, grid,
               runtime.execution(), data.train.row_bytes(),
               [this](const dataset::RawBatch& batch, std::int64_t step) { return locate(batch, step); }),
      tokens_(opened.found ? opened.found->manifest.tokens : 0) {
  add_statistics(trainer_.registry(), statistics_, world.rank());
  if (world.is_root())
    for (const std::string& sentence : dataset::constant_dimensions(statistics_, data.train))
      log::warning("{}: {}; constant targets have no standardised error", data.train.path, sentence);
}

void TrainingRun::initialise() {
  trainer_.initialise();
  if (initial_) load_initial(trainer_, *initial_, world_, runtime_.execution());
}

std::string TrainingRun::locate(const dataset::RawBatch& batch, std::int64_t step) const {
  const dataset::BlockTable table = dataset::block_table(data_.train, configuration_.data);
  const std::vector<dataset::RowRange> rows =
      dataset::locate(table, static_cast<std::uint64_t>(configuration_.run.seed), batch.begin, batch.n_tokens);
  if (!world_.is_root()) dataset::conclude_reads(data_.train);
  const std::string culprit = world_.on_root([&] {
    const std::string found = dataset::find_non_finite(data_.train, rows);
    dataset::conclude_reads(data_.train);
    return found;
  });
  if (culprit.empty()) return dataset::to_text(data_.train, rows);
  if (configuration_.run.nonfinite == NonFinite::stop)
    throw collective_error(
        ExitCode::data,
        "{}, read at step {} (parameters are those of step {}, unharmed); remove the row or regenerate the "
        "activations, or skip such batches with run.nonfinite = \"skip\"",
        culprit, step, step - 1);
  return culprit;
}

void TrainingRun::resume_at(std::int64_t step, const run::Cursor& cursor) {
  const auto at = [&](const char* name) {
    const auto found = cursor.find(name);
    if (found == cursor.end())
      throw collective_error(ExitCode::io,
                             "the checkpoint's cursor has no \"{}\" (it belongs to another kind of model); start a new "
                             "run with another --output",
                             name);
    return found->second;
  };
  cursor_ = {at("epoch"), at("position")};
  trainer_.resume_at(step);
}

run::Cursor TrainingRun::cursor() const { return {{"epoch", cursor_.epoch}, {"position", cursor_.position}}; }

void TrainingRun::start() {
  loader_.emplace(data_.train, configuration_.data, static_cast<std::uint64_t>(configuration_.run.seed), world_,
                  world_.node(), grid_, cursor_, runtime_.threads());
}

run::Step TrainingRun::step() {
  const dataset::RawBatch& batch = loader_->next();
  trainer_.step(batch);
  rows_.waited += batch.waited;
  rows_.seconds += batch.exchanging;
  rows_.bytes += batch.exchanged;
  cursor_ = batch.end;
  tokens_ += batch.n_tokens;
  const run::Step done{.work = batch.n_tokens, .waited_for_data = batch.waited};
  loader_->release();
  return done;
}

run::Metrics TrainingRun::metrics() {
  const TrainingMetrics now = trainer_.metrics();
  step_l0_ = now.l0;
  // No feature can have been silent for longer than the run.
  const bool some_may_be_dead = tokens_ >= configuration_.transcoder.dead_window;
  return {{.name = "epoch", .value = cursor_.epoch},
          {.name = "learning_rate", .value = trainer_.learning_rate()},
          {.name = "loss", .value = now.loss, .progress = "loss {:.4g}", .in_result = true},
          {.name = "layer_loss", .value = now.layer_loss},
          {.name = "nmse_standardised",
           .value = now.nmse_standardised_mean(),
           .progress = "NMSE {:.4f}",
           .in_result = true,
           .optional = true},
          {.name = "layer_nmse_standardised", .value = now.nmse_standardised, .optional = true},
          {.name = "k",
           .value = configuration_.transcoder.k_initial > 0 ? trainer_.k() : std::numeric_limits<double>::quiet_NaN(),
           .optional = true},
          {.name = "l0", .value = now.l0_mean(), .progress = "L0 {:.2f}"},
          {.name = "layer_l0", .value = now.l0},
          {.name = "dead_fraction",
           .value = some_may_be_dead ? now.dead_fraction : std::numeric_limits<double>::quiet_NaN(),
           .optional = true},
          {.name = "sparsity_penalty",
           .value =
               configuration_.transcoder.sparsity > 0 ? now.sparsity_penalty : std::numeric_limits<double>::quiet_NaN(),
           .optional = true},
          {.name = "preactivation_penalty",
           .value = configuration_.transcoder.preactivation_penalty > 0 ? now.preactivation_penalty
                                                                        : std::numeric_limits<double>::quiet_NaN(),
           .optional = true},
          {.name = "auxiliary_loss",
           .value = configuration_.transcoder.auxk > 0 ? now.auxiliary_loss : std::numeric_limits<double>::quiet_NaN(),
           .optional = true},
          {.name = "gradient_norm", .value = now.gradient_norm},
          {.name = "skipped_steps", .value = now.skipped},
          {.name = "entries_per_rank",
           .value = run::Metric::Group{{"min", now.entries_per_rank.minimum},
                                       {"mean", now.entries_per_rank.mean},
                                       {"max", now.entries_per_rank.maximum}},
           .in_result = true}};
}

const EvaluationResult& TrainingRun::validate() {
  if (validated()) return *validation_;
  step_exposed_seconds_ = trainer_.step_exposed_seconds();
  const parallel::Exchanges before = trainer_.exchanges();
  const Selector::ControllerState thresholds = trainer_.forward().selection().controller_state();
  const auto copy = [&](void* to, const void* from, device::Direction direction) {
    device::copy(runtime_.execution(), to, from, 4 * thresholds.keys.size, direction);
    kernels::fence(runtime_.execution());
  };
  // Filter thresholds are state of the run: a checkpoint must not depend on evaluations.
  std::vector<std::uint32_t> kept(static_cast<std::size_t>(thresholds.keys.size));
  if (thresholds.on_device)
    copy(kept.data(), thresholds.keys.data, device::Direction::to_host);
  else
    std::copy_n(thresholds.keys.data, kept.size(), kept.begin());
  trainer_.forward().selection().keep(configuration_.transcoder.k);  // k of the finished model
  validation_ = transcoder::evaluate(*data_.validation, trainer_.model(), trainer_.normalisation(), trainer_.forward(),
                                     world_, grid_, runtime_.execution(), configuration_.data.batch_tokens);
  if (thresholds.on_device)
    copy(thresholds.keys.data, kept.data(), device::Direction::to_device);
  else
    std::copy(kept.begin(), kept.end(), thresholds.keys.data);
  evaluation_exchanges_ += trainer_.exchanges().since(before);
  validated_step_ = trainer_.steps_done();
  return *validation_;
}

run::Metrics TrainingRun::evaluate() { return data_.validation ? validation_metrics(validate()) : run::Metrics(); }

run::Metrics validation_metrics(const EvaluationResult& measured) {
  const auto mean = [](const char* name, const std::vector<double>& by_layer, const char* progress = "") {
    return run::Metric{.name = name, .value = mean_over_layers(by_layer), .progress = progress, .optional = true};
  };
  run::Metric error = mean("validation.nmse_standardised", measured.nmse_standardised, "validation {:.4f}");
  error.compared = true;
  return {error, mean("validation.explained_variance", measured.explained_variance), mean("validation.l0", measured.l0),
          mean("validation.dead_fraction", measured.dead_fraction)};
}

run::Communication TrainingRun::communication() const {
  return {.exchanges = trainer_.exchanges().since(evaluation_exchanges_),
          .timed = trainer_.traffic_is_timed(),
          .step_bytes_sent = trainer_.step_bytes_sent(),
          .step_exposed_seconds = validated() ? step_exposed_seconds_ : trainer_.step_exposed_seconds(),
          .rows = rows_};
}

std::vector<std::pair<std::string, double>> TrainingRun::phase_bytes() {
  StepSizes sizes =
      step_sizes(configuration_, trainer_.model().shape(), grid_, validated() ? step_l0_ : trainer_.metrics().l0);
  sizes.stores_products = !trainer_.forms_products();
  return transcoder::phase_bytes(sizes);
}

void TrainingRun::conclude(Json& result) {
  if (data_.validation) {
    const EvaluationResult& measured = validate();
    if (world_.is_root()) warn_of_constant_layers(*data_.validation, measured);
    result["validation"] = to_json(measured);
    log::info("validation data, {} tokens:\n{}", format::grouped(measured.tokens), to_table(measured));
  }
  if (const auto recovery = recovered(data_.train, trainer_.model(), trainer_.normalisation(), world_, grid_,
                                      runtime_.execution(), runtime_.threads())) {
    result["recovery"] = to_json(*recovery);
    if (recovery->counted > 0)
      log::info("planted features recovered: {} of {} ({:.1f} %)", recovery->recovered, recovery->counted,
                100 * recovery->fraction);
  }
}

}  // namespace weft::transcoder

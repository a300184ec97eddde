// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/private_training_run.hpp"

#include <cstring>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "parallel/failure.hpp"
#include "transcoder/run/plan.hpp"
#include "transcoder/run/result.hpp"
#include "transcoder/run/statistics_state.hpp"
#include "transcoder/run/step_work.hpp"

namespace weft::transcoder {

PrivateTrainingRun::PrivateTrainingRun(const Configuration& configuration, const Datasets& data,
                                       const run::OpenedRun& opened, bool changed, const parallel::World& world,
                                       const parallel::Grid& grid, const device::Runtime& runtime)
    : configuration_(configuration),
      data_(data),
      world_(world),
      grid_(grid),
      runtime_(runtime),
      changed_(changed),
      records_(data.train, record_rows(configuration)),
      statistics_(opened.found
                      ? load_statistics(world, *opened.found, data.train.n_layers, data.train.d_model, data.train.path,
                                        runtime.execution())
                      : dataset::statistics(world, *data.validation,
                                            (opened.directory.path / "statistics.txt").string(), runtime.threads())),
      trainer_(with_private_mode(configuration, data.train, grid.shape()),
               shape_of(configuration.transcoder, data.train.n_layers, data.train.d_model),
               dataset::normalisation(statistics_, *data.validation, configuration.data.normalise), statistics_, grid,
               runtime.execution(), data.train.dtype),
      account_(configuration.privacy, sample_rate(configuration, records_),
               {configuration.privacy.unit, record_rows(configuration), records_.count()}),
      reader_(data.train, runtime.threads()) {
  account_.register_in(trainer_.registry(), world.is_root());
  add_statistics(trainer_.registry(), statistics_, world.rank());
}

void PrivateTrainingRun::initialise() {
  trainer_.initialise();
  account_.begin(static_cast<std::uint64_t>(configuration_.run.seed), configuration_.run.steps, world_.all());
}

void PrivateTrainingRun::resume_at(std::int64_t step, const run::Cursor& cursor) {
  const auto found = cursor.find("token");
  if (found == cursor.end())
    throw collective_error(
        ExitCode::io,
        "the checkpoint's cursor has no \"token\" (it is not of a private run); start a new run with "
        "another --output");
  token_ = found->second;
  trainer_.resume_at(step);
  account_.resume(static_cast<std::uint64_t>(configuration_.run.seed), step, configuration_.run.steps, changed_,
                  world_.all());
}

/// Makes a step. Its number of records is private: the returned work and position in the data are expectations.
run::Step PrivateTrainingRun::step() {
  const std::vector<std::int64_t> own = account_.draw(trainer_.steps_done() + 1, grid_.axis(parallel::kDataAxis));
  std::vector<std::int64_t> lengths;
  for (const std::int64_t record : own) lengths.push_back(records_.rows_of(record).count);
  trainer_.set_noise(account_.noise(expected_records(configuration_)));
  trainer_.step(lengths, [&](std::int64_t first, std::int64_t count, PrivateTrainer::Rows rows) {
    read(std::span(own).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), rows);
  });
  account_.count_step();
  token_ += configuration_.data.batch_tokens;
  return {.work = configuration_.data.batch_tokens};
}

void PrivateTrainingRun::read(std::span<const std::int64_t> records, PrivateTrainer::Rows rows) {
  const std::int64_t row_bytes = data_.train.row_bytes();
  std::vector<dataset::RowRead> reads;
  std::int64_t at = 0;
  for (const std::int64_t record : records) {
    const RecordTable::Rows of = records_.rows_of(record);
    reads.push_back(
        {of.file, of.begin, of.count, rows.inputs + at, data_.train.targets_are_inputs ? nullptr : rows.targets + at});
    at += of.count * row_bytes;
  }
  reader_.read(reads);
  if (data_.train.targets_are_inputs) std::memcpy(rows.targets, rows.inputs, static_cast<std::size_t>(at));
}

run::Metrics PrivateTrainingRun::metrics() {
  const PrivateTrainer::Metrics now = trainer_.metrics();
  run::Metrics metrics = {
      {.name = "epoch", .value = static_cast<double>(token_) / static_cast<double>(data_.train.n_rows)},
      {.name = "learning_rate", .value = now.learning_rate},
      {.name = "gradient_norm", .value = now.gradient_norm, .progress = "noisy gradient {:.3g}"}};
  if (configuration_.privacy.adapts_clip())
    metrics.push_back({.name = "clip_bound", .value = now.clip_bound, .progress = "clip {:.3g}"});
  return metrics;
}

const EvaluationResult& PrivateTrainingRun::validate() {
  if (validated_step_ == trainer_.steps_done()) return *validation_;
  trainer_.wait();
  trainer_.forward().selection().keep(configuration_.transcoder.k);
  validation_ = transcoder::evaluate(*data_.validation, trainer_.model(), trainer_.normalisation(), trainer_.forward(),
                                     world_, grid_, runtime_.execution(), configuration_.data.batch_tokens);
  validated_step_ = trainer_.steps_done();
  return *validation_;
}

run::Metrics PrivateTrainingRun::evaluate() { return validation_metrics(validate()); }

run::Communication PrivateTrainingRun::communication() const {
  return {.exchanges = trainer_.exchanges(), .step_bytes_sent = trainer_.step_bytes_sent()};
}

std::vector<std::pair<std::string, double>> PrivateTrainingRun::phase_bytes() {
  return private_phase_bytes(with_private_mode(configuration_, data_.train, grid_.shape()), trainer_.model().shape(),
                             grid_, data_.train.row_bytes());
}

void PrivateTrainingRun::conclude(Json& result) {
  const EvaluationResult& measured = validate();
  if (world_.is_root()) warn_of_constant_layers(*data_.validation, measured);
  result["validation"] = to_json(measured);
  log::info("validation data, {} tokens:\n{}", format::grouped(measured.tokens), to_table(measured));
  const privacy::Guarantee guarantee =
      account_.guarantee(world_.all(), configuration_.run.steps - trainer_.steps_done());
  result["privacy"] = privacy::to_json(guarantee);
  guarantee_ = privacy::to_text(guarantee);
}

}  // namespace weft::transcoder

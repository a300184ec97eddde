// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/private_training_run.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "parallel/failure.hpp"
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
      largest_(with_largest_batch(configuration, records_.count(), grid.world().size())),
      trainer_(largest_, shape_of(configuration.transcoder, data.train.n_layers, data.train.d_model),
               dataset::normalisation(statistics_, *data.validation, configuration.data.normalise), statistics_, grid,
               runtime.execution(), data.train.row_bytes(),
               [](const dataset::RawBatch&, std::int64_t) { return std::string("its records"); }),
      account_(configuration.privacy, sample_rate(configuration, records_),
               {configuration.privacy.unit, record_rows(configuration), records_.count()}),
      reader_(data.train, runtime.threads()),
      inputs_(grid.shape().largest_part(largest_.data.batch_tokens) * data.train.row_bytes()),
      targets_(inputs_.array().size) {
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
  const std::vector<std::int64_t> drawn = account_.draw(trainer_.steps_done() + 1);
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t record : drawn) offsets.push_back(offsets.back() + records_.rows_of(record).count);
  if (const std::int64_t most = largest_.data.batch_tokens / record_rows(configuration_); std::ssize(drawn) > most)
    throw collective_error(
        ExitCode::numeric,
        "step {} has {} records, more than the {} for which there is memory (which has a probability "
        "below 1e-20); begin again with another output directory",
        trainer_.steps_done() + 1, drawn.size(), most);
  const std::int64_t n_rows = std::max<std::int64_t>(offsets.back(), world_.size());
  const parallel::Range own = grid_.own_part(n_rows);
  read(drawn, offsets, own);
  trainer_.set_noise(account_.noise(expected_records(configuration_)));
  trainer_.set_records(std::move(offsets));
  const std::int64_t width = trainer_.model().shape().width();
  const auto rows = [&](device::HostBuffer<std::byte>& buffer) -> kernels::AnyMatrix {
    return {buffer.data(), data_.train.dtype, own.size(), width, width};
  };
  dataset::RawBatch batch;
  batch.inputs = rows(inputs_);
  batch.targets = rows(targets_);
  batch.n_tokens = n_rows;
  trainer_.step(batch);
  account_.count_step();
  token_ += configuration_.data.batch_tokens;
  return {.work = configuration_.data.batch_tokens};
}

/// Reads the own rows of a batch of records; those of no record are 0.
void PrivateTrainingRun::read(std::span<const std::int64_t> records, std::span<const std::int64_t> offsets,
                              parallel::Range own) {
  const std::int64_t row_bytes = data_.train.row_bytes();
  std::vector<dataset::RowRead> reads;
  for (std::size_t b = 0; b < records.size(); ++b) {
    const parallel::Range here = intersection(own, {offsets[b], offsets[b + 1]});
    if (here.size() <= 0) continue;
    const RecordTable::Rows rows = records_.rows_of(records[b]);
    const std::int64_t at = (here.begin - own.begin) * row_bytes;
    reads.push_back({rows.file, rows.begin + here.begin - offsets[b], here.size(), inputs_.data() + at,
                     data_.train.targets_are_inputs ? nullptr : targets_.data() + at});
  }
  reader_.read(reads);
  const std::int64_t bytes = own.size() * row_bytes,
                     read = std::clamp<std::int64_t>(offsets.back() - own.begin, 0, own.size()) * row_bytes;
  if (data_.train.targets_are_inputs && read > 0)
    std::memcpy(targets_.data(), inputs_.data(), static_cast<std::size_t>(read));
  for (std::byte* const rows : {inputs_.data(), targets_.data()}) std::fill(rows + read, rows + bytes, std::byte{0});
}

run::Metrics PrivateTrainingRun::metrics() {
  run::Metrics metrics = {
      {.name = "epoch", .value = static_cast<double>(token_) / static_cast<double>(data_.train.n_rows)},
      {.name = "learning_rate", .value = trainer_.learning_rate()}};
  if (configuration_.optimizer.clip_norm > 0)
    metrics.push_back(
        {.name = "gradient_norm", .value = trainer_.gradient_norm(), .progress = "noisy gradient {:.3g}"});
  if (configuration_.privacy.adapts_clip())
    metrics.push_back({.name = "clip_bound", .value = trainer_.clip_bound(), .progress = "clip {:.3g}"});
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

/// Counts the entries that topk keeps, and none of other activations: their number follows from private data.
std::vector<std::pair<std::string, double>> PrivateTrainingRun::phase_bytes() {
  const Shape& shape = trainer_.model().shape();
  std::vector<double> l0;
  if (kernels::activation_keeps_k(configuration_.transcoder.activation))
    l0.assign(static_cast<std::size_t>(shape.n_layers), configuration_.transcoder.k);
  StepSizes sizes = step_sizes(configuration_, shape, grid_, l0);
  sizes.stores_products = !trainer_.forms_products();
  return transcoder::phase_bytes(sizes);
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

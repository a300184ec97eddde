// SPDX-License-Identifier: Apache-2.0
//
// weft train INPUT: the main job.
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <numeric>

#include "base/fault.hpp"
#include "base/log.hpp"
#include "checkpoint/starts.hpp"
#include "checkpoint/writer.hpp"
#include "commands/commands.hpp"
#include "commands/run_directory.hpp"
#include "commands/shared/algorithms.hpp"
#include "commands/shared/benchmark_work.hpp"
#include "commands/shared/profile.hpp"
#include "commands/transcoder/result.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "parallel/nccl.hpp"
#include "parallel/signals.hpp"
#include "parallel/watchdog.hpp"
#include "report/build.hpp"
#include "report/format.hpp"
#include "report/log.hpp"
#include "report/metrics.hpp"
#include "report/run_record.hpp"
#include "transcoder/agreement.hpp"
#include "transcoder/plan.hpp"
#include "transcoder/statistics_state.hpp"

namespace weft::commands {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Training data and, when there are some, held-out data of the same model.
struct Data {
  dataset::Description train;
  std::optional<dataset::Description> validation;
};

/// For a dry run: whether to plan from data.layers and data.d_model, because the files are not there yet.
bool data_are_to_come(const transcoder::Configuration& configuration, const parallel::World& world) {
  if (configuration.data.layers == 0) return false;
  return world.on_root([&] {
    return std::string(std::filesystem::exists(configuration.data.train) ? "" : "to come");
  }) == "to come";
}

Data describe_data(const transcoder::Configuration& configuration, const parallel::World& world) {
  Data data{dataset::describe(world, configuration.data.train, configuration.data), std::nullopt};
  if (configuration.data.validation.empty()) return data;
  data.validation = dataset::describe(world, configuration.data.validation, configuration.data);
  if (data.validation->n_layers != data.train.n_layers || data.validation->d_model != data.train.d_model)
    throw collective_error(
        ExitCode::data,
        "{} has {} layers of width {}, {} has {} of {} (both must come from one model); correct data.validation",
        data.validation->path, data.validation->n_layers, data.validation->d_model, data.train.path,
        data.train.n_layers, data.train.d_model);
  return data;
}

/// What the GPU of every rank has for this run; 0 on the host. Collective.
std::int64_t usable_device_bytes(const transcoder::Configuration& configuration, const parallel::World& world) {
  if (device::driver_total_bytes() == 0) return 0;
  std::int64_t taken = -(device::driver_total_bytes() - device::driver_bytes() + transcoder::kContextBytes);
  world.all().maximum({&taken, 1});
  const std::int64_t allowed = static_cast<std::int64_t>(configuration.device.memory * 1e9);
  return allowed > 0 ? std::min(allowed, -taken) : -taken;
}

/// A line for each host and device: what rank computes where, with the bus id of a GPU.
std::string who_computes_where() {
  const report::Json& hosts = report::run_record()["hosts"];
  std::string text;
  for (const report::Json& entry : hosts) {
    const auto ranks = entry["ranks"].get<std::vector<std::int64_t>>();
    text += fmt::format("rank{} {} on {}: {}\n", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                        entry["host"].get<std::string>(), entry["device"].get<std::string>());
  }
  return text;
}

/// The run between its first and its last step: everything the loop touches.
class Run {
 public:
  Run(const Request& request, const Input& input, const input::Schema& schema, const Data& data,
      const OpenedRun& opened, const parallel::World& world, const device::Runtime& runtime, Clock::time_point start,
      std::int64_t planned_device_bytes)
      : request_(request),
        configuration_(input.configuration),
        data_(data),
        world_(world),
        runtime_(runtime),
        start_(start),
        planned_device_bytes_(planned_device_bytes),
        directory_(opened.directory),
        resolved_input_(input::print(schema)),
        grid_(world, parallel::grid_shape(configuration_.parallel.data, {"feature", configuration_.parallel.feature},
                                          world.size())),
        statistics_(opened.found ? transcoder::load_statistics(world, *opened.found, data.train.n_layers,
                                                               data.train.d_model, runtime.execution())
                                 : dataset::statistics(world, data.train, (directory_.path / "statistics.txt").string(),
                                                       runtime.threads())),
        trainer_(configuration_, {data.train.n_layers, data.train.d_model, configuration_.transcoder.features},
                 dataset::normalisation(statistics_, data.train, configuration_.data.normalise), statistics_, grid_,
                 runtime.execution(), [this](const dataset::RawBatch& batch) { return locate(batch); }),
        metrics_(world.is_root()
                     ? std::make_optional<report::MetricsWriter>(directory_.path / "metrics.jsonl",
                                                                 opened.found ? opened.found->manifest.step : -1)
                     : std::nullopt) {
    transcoder::add_statistics(trainer_.registry(), statistics_, world.rank());
    if (opened.found) {
      checkpoint::load(world.all(), *opened.found, trainer_.registry(), runtime.execution());
      const checkpoint::Manifest& manifest = opened.found->manifest;
      trainer_.resume_at(manifest.step);
      tokens_ = manifest.tokens;
      cursor_ = {manifest.cursor_at("epoch"), manifest.cursor_at("position")};
    } else {
      trainer_.initialise();
    }
    first_step_ = trainer_.steps_done();
    writer_.emplace(world.all(), directory_.checkpoints(), configuration_.checkpoint, trainer_.registry(),
                    runtime.execution(), opened.found ? opened.found->path : std::filesystem::path());
  }

  std::int64_t first_step() const { return first_step_; }
  std::int64_t steps_done() const { return trainer_.steps_done(); }

  /// Steps until the last one is done or somebody asks to stop. Returns the exit code. Collective.
  int train();
  /// Held-out measures, summary, record. Collective.
  void conclude();
  /// Of the last step, for --profile. Collective.
  PhaseBytes phase_bytes() {
    return commands::phase_bytes(Formulation::sparse,
                                 step_sizes(configuration_, trainer_.model().shape(), grid_, trainer_.metrics().l0));
  }

 private:
  std::string locate(const dataset::RawBatch& batch) const {
    const dataset::BlockTable table = dataset::block_table(data_.train, configuration_.data);
    return dataset::to_text(data_.train, dataset::locate(table, static_cast<std::uint64_t>(configuration_.run.seed),
                                                         batch.begin, batch.n_tokens));
  }
  checkpoint::Manifest manifest() const;
  void begin_checkpoint();
  void report(const std::optional<checkpoint::Report>& done) const {
    if (done && done->durable) log::info("{}", done->line());
  }
  report::Json step_communication() const;
  void log_step(double data_wait);
  report::Json communication() const;

  const Request& request_;
  const transcoder::Configuration& configuration_;
  const Data& data_;
  const parallel::World& world_;
  const device::Runtime& runtime_;
  Clock::time_point start_;
  std::int64_t planned_device_bytes_;
  RunDirectory directory_;
  std::string resolved_input_;
  parallel::Grid grid_;
  dataset::Statistics statistics_;
  transcoder::Trainer trainer_;
  std::optional<report::MetricsWriter> metrics_;  // rank 0
  std::optional<checkpoint::Writer> writer_;
  dataset::Cursor cursor_;
  std::int64_t tokens_ = 0, first_step_ = 0;
  std::int64_t logged_step_ = 0;  // of this start: for the rate of an interval
  Clock::time_point logged_at_, loop_begin_;
  struct {
    double waited = 0, exchanging = 0;  // seconds that steps waited; that rows were on their way between ranks
    std::int64_t exchanged = 0;         // bytes sent
  } rows_;
  double trained_seconds_ = 0, checkpoint_seconds_ = 0;  // steps alone; what they waited for checkpoints
};

checkpoint::Manifest Run::manifest() const {
  checkpoint::Manifest manifest;
  manifest.step = trainer_.steps_done();
  manifest.tokens = tokens_;
  manifest.cursor = {{"epoch", cursor_.epoch}, {"position", cursor_.position}};
  manifest.grid = grid_.shape().sizes();
  manifest.input = resolved_input_;
  manifest.original_input = request_.input_text;
  manifest.code_revision = report::build_record.revision;
  manifest.libraries = library_versions();
  manifest.dataset_fingerprint = data_.train.fingerprint;
  if (const report::Json algorithms = algorithms_in_use(); !algorithms.empty())
    manifest.extra = report::to_text({{"algorithms", algorithms}});
  return manifest;
}

void Run::begin_checkpoint() {
  parallel::note_phase("checkpoint");
  trainer_.settle();
  const Clock::time_point begin = Clock::now();
  report(writer_->finish());
  writer_->start(manifest());
  checkpoint_seconds_ += seconds_since(begin);
}

/// Of the last step, which is over: means over ranks. Collective.
report::Json Run::step_communication() const {
  double means[] = {static_cast<double>(trainer_.step_bytes_sent()), trainer_.step_exposed_seconds()};
  world_.all().sum(std::span<double>(means));
  for (double& mean : means) mean /= world_.size();
  return {{"bytes_sent", std::llround(means[0])}, {"exposed_seconds", means[1]}};
}

void Run::log_step(double data_wait) {
  const transcoder::TrainingMetrics now = trainer_.metrics();
  const std::int64_t step = trainer_.steps_done();
  const report::Json communication = world_.size() > 1 ? step_communication() : report::Json();
  const double seconds = seconds_since(logged_at_);
  const double rate = static_cast<double>((step - logged_step_) * configuration_.data.batch_tokens) / seconds;
  if (world_.is_root()) {
    report::Json line;
    line["step"] = step;
    line["tokens"] = tokens_;
    line["epoch"] = cursor_.epoch;
    line["learning_rate"] = trainer_.learning_rate();
    line.update(to_json(now));
    line["seconds"] = seconds_since(start_);
    line["tokens_per_second"] = rate;
    line["data_wait_seconds"] = data_wait;
    if (!communication.is_null()) line["communication"] = communication;
    metrics_->write(line);
    report::run_record()["result"]["train"] = {{"loss", now.loss},
                                               {"nmse_standardised", now.nmse_standardised_mean()},
                                               {"entries_per_rank", line["entries_per_rank"]}};
  }
  report::status(report::progress_text(
      {.step = step,
       .steps = configuration_.run.steps,
       .loss = now.loss,
       .nmse = now.nmse_standardised_mean(),
       .l0 = now.l0_mean(),
       .tokens_per_second = rate,
       .seconds_left =
           static_cast<double>((configuration_.run.steps - step) * configuration_.data.batch_tokens) / rate}));
  logged_step_ = step;
  logged_at_ = Clock::now();
}

int Run::train() {
  const std::int64_t steps = configuration_.run.steps, every = configuration_.checkpoint.every;
  const double walltime = static_cast<double>(training::parse_walltime(configuration_.run.walltime).value_or(0));
  const parallel::Watchdog watchdog(world_, directory_.path / "heartbeat", configuration_.parallel.timeout);
  transcoder::Agreement agreement(world_.all(), directory_.path, walltime, start_);
  dataset::Loader loader(data_.train, configuration_.data, static_cast<std::uint64_t>(configuration_.run.seed), world_,
                         world_.node(), grid_, cursor_, runtime_.threads());
  int code = 0;
  double waited = 0, longest_step = 0;
  loop_begin_ = logged_at_ = Clock::now();
  logged_step_ = trainer_.steps_done();
  while (trainer_.steps_done() < steps && code == 0) {
    const Clock::time_point begin = Clock::now();
    const std::int64_t step = trainer_.steps_done() + 1;
    report::set_current_step(step);
    parallel::note_step(step);
    parallel::note_phase("waiting for data");
    const dataset::RawBatch& batch = loader.next();
    fault::point("step", world_.rank(), step);
    trainer_.step(batch);
    waited += batch.waited;
    rows_.waited += batch.waited;
    rows_.exchanging += batch.exchanging;
    rows_.exchanged += batch.exchanged;
    cursor_ = batch.end;
    tokens_ += batch.n_tokens;
    loader.release();
    if (step % configuration_.log.every == 0 || step == steps) log_step(std::exchange(waited, 0.0));
    longest_step = std::max(longest_step, seconds_since(begin));

    parallel::note_phase("agreement");
    const transcoder::Decision decision =
        agreement.step(writer_->busy() && writer_->shard_done(), 2 * writer_->last_seconds() + 3 * longest_step);
    if (decision.shards_written && writer_->busy()) report(writer_->advance());
    code = static_cast<int>(decision.stop);
    if (code != 0 || step == steps || decision.checkpoint || (every > 0 && step % every == 0)) begin_checkpoint();
  }
  agreement.drain();
  trained_seconds_ = seconds_since(loop_begin_) - checkpoint_seconds_;
  report(writer_->finish());
  if (trainer_.steps_done() > first_step_ && writer_->last_durable() != trainer_.steps_done())
    throw collective_error(
        ExitCode::io,
        "{}: step {}, at which this run ends, is in no checkpoint (why stands above); make room and "
        "start again: the run goes on from {}",
        directory_.checkpoints().string(), trainer_.steps_done(),
        writer_->last_durable() < 0 ? "its beginning" : "step " + std::to_string(writer_->last_durable()));
  report::set_current_step(-1);
  return code;
}

/// What went between ranks, a step: means over ranks. Rows travel beside the step (hidden, but for what steps waited),
/// everything else inside it. Collective.
report::Json Run::communication() const {
  const std::int64_t steps = std::max<std::int64_t>(1, trainer_.steps_done() - first_step_);
  double rows[] = {static_cast<double>(rows_.exchanged), rows_.exchanging, rows_.waited};
  world_.all().sum(std::span<double>(rows));
  for (double& sum : rows) sum /= static_cast<double>(steps) * world_.size();
  const std::vector<parallel::ExchangeProfile> profile = parallel::profile(trainer_.exchanges(), steps, world_.all());
  report::Json exchanges = report::Json::object();
  double bytes = 0, seconds = 0;
  for (const parallel::ExchangeProfile& one : profile) {
    bytes += one.bytes;
    seconds += one.seconds;
    // Where steps run without the host, nobody here has seen how long an exchange took (weft benchmark can).
    const bool timed = trainer_.traffic_is_timed();
    exchanges[one.name] = {{"bytes", one.bytes},
                           {"ms", timed ? report::Json(1e3 * one.seconds) : report::Json()},
                           {"gb_per_second", timed ? report::Json(one.gb_per_second()) : report::Json()}};
  }
  // Then what is known is how long the last step stood still.
  double exposed = trainer_.traffic_is_timed() ? seconds : trainer_.step_exposed_seconds() / world_.size();
  if (!trainer_.traffic_is_timed()) world_.all().sum(std::span<double>(&exposed, 1));
  return {{"bytes", bytes},
          {"exposed_ms", 1e3 * exposed},
          {"exchanges", exchanges},
          {"rows", {{"bytes", rows[0]}, {"hidden_ms", 1e3 * rows[1]}, {"waited_ms", 1e3 * rows[2]}}}};
}

void Run::conclude() {
  const std::int64_t done = trainer_.steps_done() - first_step_;
  const double rate =
      trained_seconds_ > 0 ? static_cast<double>(done * configuration_.data.batch_tokens) / trained_seconds_ : 0;
  const std::vector<report::Timers::Statistics> timings = trainer_.timers().gather(world_.all());
  report::Json& record = report::run_record();
  record["device"]["algorithms"] = algorithms_in_use();
  record["result"]["step"] = trainer_.steps_done();
  record["result"]["tokens"] = tokens_;
  record["result"]["tokens_per_second"] = rate;
  record["result"]["checkpoint_pause_seconds"] = checkpoint_seconds_;
  record["timings"] = report::to_json(timings);
  if (world_.size() > 1) record["communication"] = communication();
  const device::MemoryUse memory = device::memory_use();
  record["device"]["peak_bytes"] = memory.device_peak_bytes;
  record["device"]["planned_bytes"] = planned_device_bytes_;
  if (const std::int64_t taken = device::driver_bytes(); taken > 0) record["device"]["driver_bytes"] = taken;
  record["host_peak_bytes"] = memory.host_peak_bytes;
  if (done > 0) log::info("{}", report::to_table(timings));
  if (trainer_.steps_done() < configuration_.run.steps) return;

  if (data_.validation) {
    const transcoder::EvaluationResult result =
        transcoder::evaluate(*data_.validation, trainer_.model(), trainer_.normalisation(), trainer_.forward(), world_,
                             grid_, runtime_.execution(), configuration_.data.batch_tokens);
    record["result"]["validation"] = to_json(result);
    log::info("held-out data, {} tokens:\n{}", report::grouped(result.tokens), to_table(result));
  }
  if (const auto recovery = recovered(data_.train.path, trainer_.model(), trainer_.normalisation(), world_, grid_,
                                      runtime_.execution(), runtime_.threads())) {
    record["result"]["recovery"] = to_json(*recovery);
    if (recovery->counted > 0)
      log::info("planted features recovered: {} of {} ({:.1f} %)", recovery->recovered, recovery->counted,
                100 * recovery->fraction);
  }
  log::info("trained {} steps, {} tokens in {} ({} tokens/s)", done,
            report::grouped(done * configuration_.data.batch_tokens), report::duration(trained_seconds_),
            report::grouped(std::llround(rate)));
  log::info("results in {}: log.txt, metrics.jsonl, run.json, checkpoints/", directory_.path.string());
}

}  // namespace

int train(const Request& request, const parallel::World& world) {
  const Clock::time_point start = Clock::now();
  // 1. The input, the headers of the data, the grid of ranks: all that can be wrong before work starts.
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input(request, schema, world);
  const transcoder::Configuration& configuration = input.configuration;
  const std::int64_t ranks =
      request.dry_run && configuration.parallel.world > 0 ? configuration.parallel.world : world.size();
  const parallel::GridShape grid =
      parallel::grid_shape(configuration.parallel.data, {"feature", configuration.parallel.feature}, ranks);
  const bool imagined = request.dry_run && data_are_to_come(configuration, world);
  const Data data = imagined ? Data{dataset::imagined(configuration.data.train, configuration.data), std::nullopt}
                             : describe_data(configuration, world);
  transcoder::check_layers(configuration.transcoder, data.train.n_layers);
  use_recorded_algorithms(configuration, world);
  const transcoder::Plan planned = transcoder::plan(configuration, data.train, grid);
  const std::string plan = transcoder::to_text(planned, configuration);
  if (const std::string advice = transcoder::grid_advice(planned); !advice.empty()) log::warning("{}", advice);
  if (request.dry_run) {
    if (configuration.device.memory > 0)
      transcoder::micro_tokens_that_fit(configuration, data.train, grid,
                                        static_cast<std::int64_t>(configuration.device.memory * 1e9));
    require_usable_output(world, configuration.run.output);
    log::info("{}{}",
              imagined ? fmt::format("{}: not there yet; planned for {} layers of width {} in bf16, as data.layers and "
                                     "data.d_model say\n",
                                     data.train.path, data.train.n_layers, data.train.d_model)
                       : dataset::summary(data.train),
              plan);
    return 0;
  }

  // Until the process ends: a request may come while a checkpoint is read, and is then acted on in the first steps;
  // twice; or, from a scheduler, while a finished run is evaluated, and is then no longer needed.
  // Never destroyed: that would bring the default actions back some moments before the process has ended.
  static const auto* const signals = new parallel::Signals;
  static_cast<void>(signals);

  // 2. The run's directory; a run that was interrupted goes on.
  const OpenedRun opened = open_run(request, schema, configuration, world);
  if (opened.found) check_same_run(schema, configuration, *opened.found, data.train.fingerprint);
  keep_input(opened.directory, schema, world);
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(), world.node_size());
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  if (opened.found) use_recorded_algorithms(configuration, world, opened.found->manifest.extra);
  Profile profile(request.profile, world, runtime);
  report::record_start(world, request.command_line, library_versions(), runtime.description());
  log::info("{}{}{}", who_computes_where(), dataset::summary(data.train), plan);
  if (const std::int64_t usable = usable_device_bytes(configuration, world); usable > 0)
    input.configuration.data.micro_tokens = transcoder::micro_tokens_that_fit(configuration, data.train, grid, usable);

  // 3. Train.
  Run run(request, input, schema, data, opened, world, runtime, start, planned.device_total());
  checkpoint::Starts starts(opened.directory.path);
  world.on_root([&]() -> std::string {
    starts.begin(run.first_step(), configuration.resume.ignore_no_progress);
    return {};
  });
  log::info("{} step {} of {}", opened.found ? "going on behind" : "starting at", run.first_step(),
            configuration.run.steps);
  int code = run.train();

  // 4. Say how it went.
  if (code == 0) parallel::Signals::let_stop();
  run.conclude();
  if (profile.active()) report::run_record()["profile"] = profile.conclude(opened.directory.path, run.phase_bytes());
  if (world.is_root()) starts.end(run.steps_done());
  if (code == static_cast<int>(ExitCode::requeue) && run.steps_done() == run.first_step())
    code = static_cast<int>(ExitCode::no_progress);
  return code;
}

}  // namespace weft::commands

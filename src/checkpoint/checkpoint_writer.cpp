// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_writer.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/contract.hpp"
#include "base/fault.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "checkpoint/best.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/shard.hpp"
#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/digest.hpp"
#include "storage/digested_file.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"
#include "storage/tensor_file.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Bytes of the state that a thread copies per work item.
constexpr std::int64_t kCopyBytes = std::int64_t{4} << 20;

/// Digest of what every rank must register identically.
std::string common_digest(const Registry& registry) {
  std::string text;
  for (const Tensor& tensor : registry.tensors())
    text += fmt::format("{} {} {}\n", tensor.name, name_of(tensor.type), fmt::join(tensor.shape, ","));
  return storage::sha256(text);
}

}  // namespace

// --- the writer ----------------------------------------------------------------------------------------------------

struct Writer::State {
  const parallel::Communicator& world;
  const parallel::Communicator& place;  // ranks that share this directory
  const fs::path directory;
  const Settings settings;
  const Registry& registry;
  const kernels::Execution execution;

  device::Allocation staging;         // full: this rank's share; chunked: one piece
  std::vector<std::int64_t> offsets;  // full: offset of the owned rows of each tensor in it

  std::vector<std::int64_t> durable;  // steps of the checkpoints of this run, ascending; rank 0 only
  std::int64_t last_durable = -1;
  double last_seconds = 0;
  std::int64_t failures = 0;  // consecutive

  // The checkpoint in progress. Each phase has its own thread: all ranks write their shards, then rank 0 publishes.
  enum class Phase { idle, writing, publishing } phase = Phase::idle;
  Manifest manifest;
  fs::path temporary;
  bool copying = false;
  std::int64_t phases = 0;  // begun since the construction
  Clock::time_point begin;
  double pause = 0, shard_seconds = 0;
  bool cache_was_reported = false;
  std::thread thread;
  std::atomic<bool> done{false};
  std::atomic<bool> cancelled{false};  // the run ends with an error: the shard is not needed
  Shard shard;                         // result of the thread, read after it has been joined
  std::optional<parallel::Failure> failure;

  State(const parallel::Communicator& world_, const parallel::Communicator& place_, fs::path directory_,
        const Settings& settings_, const Registry& registry_, const kernels::Execution& execution_)
      : world(world_),
        place(place_),
        directory(std::move(directory_)),
        settings(settings_),
        registry(registry_),
        execution(execution_),
        staging(staging_bytes(settings_, registry_), device::Allocation::Where::host) {
    // Touch the pages now, not during the pause of the first checkpoint.
    if (staging.bytes() > 0) std::memset(staging.data(), 0, static_cast<std::size_t>(staging.bytes()));
    std::int64_t at = 0;
    for (const Tensor& tensor : registry.tensors()) {
      offsets.push_back(at);
      at += aligned(tensor.owned.size() * tensor.row_bytes());
    }
  }

  ~State() {
    cancelled = true;
    if (thread.joinable()) thread.join();
  }

  bool publishes() const { return place.rank() == 0; }

  /// Runs `function` on one rank of each directory. Returns the first failure, on every rank. Collective.
  template <class Function>
  std::optional<parallel::Failure> attempt_once(Function&& function) const {
    auto failed = parallel::attempt_on_root(place, function);
    return place.size() == world.size() ? failed : parallel::agree(world, failed);
  }

  /// Copies rows to `to`. Asynchronous copies from the device are not awaited.
  void copy_out(const Tensor& tensor, parallel::Range rows, void* to) const {
    const std::int64_t bytes = rows.size() * tensor.row_bytes();
    const char* from = static_cast<const char*>(tensor.data) + (rows.begin - tensor.held.begin) * tensor.row_bytes();
    if (tensor.gather)
      tensor.gather(rows, to);
    else if (tensor.on_device)
      device::copy(execution, to, from, bytes, device::Direction::to_host);
    else
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

  /// Training waits for this copy: plain rows in host memory are therefore copied by several threads.
  void stage_all() const {
    struct Piece {
      const Tensor* tensor;
      parallel::Range rows;
      char* to;
    };
    std::vector<Piece> pieces;
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      const Tensor& tensor = registry.tensors()[t];
      char* const to = static_cast<char*>(staging.data()) + offsets[t];
      if (tensor.gather || (tensor.on_device && device::is_asynchronous(execution))) {
        if (tensor.owned.size() > 0) copy_out(tensor, tensor.owned, to);
        continue;
      }
      const std::int64_t rows = std::max<std::int64_t>(1, kCopyBytes / tensor.row_bytes());
      for (std::int64_t begin = tensor.owned.begin; begin < tensor.owned.end; begin += rows)
        pieces.push_back({&tensor,
                          {begin, std::min(begin + rows, tensor.owned.end)},
                          to + (begin - tensor.owned.begin) * tensor.row_bytes()});
    }
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < pieces.size(); i = next++)
        copy_out(*pieces[i].tensor, pieces[i].rows, pieces[i].to);
    };
    const std::size_t wanted =
        staging.bytes() < 4 * kCopyBytes ? 1 : static_cast<std::size_t>(storage::digest_threads());
    {
      std::vector<std::jthread> helpers;  // joined also if another one cannot be started
      while (helpers.size() + 1 < wanted) helpers.emplace_back(work);
      work();
    }
    kernels::fence(execution);
  }

  const void* staged(std::size_t t, parallel::Range rows) const {
    if (cancelled) throw error(ExitCode::io, "abandoned, the run ends");
    const Tensor& tensor = registry.tensors()[t];
    return static_cast<const char*>(staging.data()) + offsets[t] +
           (rows.begin - tensor.owned.begin) * tensor.row_bytes();
  }

  const void* live(std::size_t t, parallel::Range rows) const {
    const Tensor& tensor = registry.tensors()[t];
    if (!tensor.gather && !tensor.on_device)
      return static_cast<const char*>(tensor.data) + (rows.begin - tensor.held.begin) * tensor.row_bytes();
    copy_out(tensor, rows, staging.data());
    kernels::fence(execution);
    return staging.data();
  }

  void write(const RowSource& source, int threads) {
    const trace::Scope scope(trace::Row::writer, "write shard");
    const fs::path path = temporary / shard_name(world.rank());
    failure = parallel::attempt([&] {
      storage::require_ownership();
      shard = write_shard(path, world.rank(), manifest, registry, source, threads);
    });
    shard_seconds = seconds_since(begin);
    done = true;
  }

  void copy(const std::vector<ShardSource>& sources) {
    const trace::Scope scope(trace::Row::writer, "copy shard");
    failure = parallel::attempt([&] {
      for (const ShardSource& source : sources) {
        const ShardEntry& entry = manifest.shards[source.shard];
        storage::require_ownership();
        copy_shard(source.file, temporary / entry.file, entry, cancelled, [&](const char* point) { pass(point); });
      }
    });
    shard_seconds = seconds_since(begin);
    done = true;
  }

  /// Prepares the directory of a new checkpoint. Collective.
  void open_temporary(bool copies) {
    // The name contains the token of the owner: ranks of a run that lost the directory never write into this one's.
    const std::string& owner = manifest.owner;
    temporary =
        directory / fmt::format("{}{}{:.8}.tmp", directory_name(manifest.step), owner.empty() ? "" : ".", owner);
    copying = copies;
    done = false;
    phase = Phase::writing;
    ++phases;
    failure = attempt_once([&] {
      storage::require_ownership();
      fs::remove_all(temporary);
      fs::create_directories(temporary);
    });
  }

  /// Gathers sizes, digests and owned rows of all shards into the manifest. Collective.
  void collect_shards() {
    const std::size_t n_ranks = static_cast<std::size_t>(world.size()), n_tensors = registry.tensors().size();
    std::vector<std::int64_t> mine{shard.bytes}, all((1 + 2 * n_tensors) * n_ranks);
    for (const Tensor& tensor : registry.tensors()) {
      mine.push_back(tensor.owned.begin);
      mine.push_back(tensor.owned.end);
    }
    world.all_gather(mine.data(), all.data(), static_cast<std::int64_t>(mine.size() * sizeof mine[0]));
    manifest.tensors.clear();
    for (const Tensor& tensor : registry.tensors())
      manifest.tensors.push_back({tensor.name, tensor.type, tensor.shape});
    manifest.shards.assign(n_ranks, {});
    std::vector<std::int64_t> digest_bytes(n_ranks);
    std::int64_t total = 0;
    for (std::size_t r = 0; r < n_ranks; ++r) {
      const std::int64_t* values = all.data() + r * mine.size();
      ShardEntry& entry = manifest.shards[r];
      entry.file = shard_name(static_cast<int>(r));
      entry.bytes = values[0];
      for (std::size_t t = 0; t < n_tensors; ++t) entry.owned.push_back({values[1 + 2 * t], values[2 + 2 * t]});
      digest_bytes[r] = storage::digest_segments(entry.bytes) * 64;
      total += digest_bytes[r];
    }
    std::string digests;
    for (const std::string& digest : shard.sha256) digests += digest;
    std::string gathered(static_cast<std::size_t>(total), '0');
    world.all_gather_uneven(digests.data(), gathered.data(), digest_bytes);
    std::size_t at = 0;
    for (ShardEntry& entry : manifest.shards)
      for (std::int64_t i = 0; i < storage::digest_segments(entry.bytes); ++i, at += 64)
        entry.sha256.push_back(gathered.substr(at, 64));
  }

  void pass(const char* point) const { fault::point(point, world.rank(), manifest.step); }

  /// Turns complete shards into a durable checkpoint. Rank 0.
  void publish(const fs::path& path) {
    pass("before-manifest");
    storage::require_ownership();
    const std::string text = to_text(manifest);
    try {
      parse(text);
    } catch (const Error& failure) {  // finds ranks that registered inconsistent rows now, not when resuming
      throw error(ExitCode::internal, "this checkpoint could not be read back: {}", failure.what());
    }
    storage::write_text(temporary / kManifestName, text);
    storage::sync_directory(temporary);
    pass("before-rename");
    storage::require_ownership();
    if (fs::exists(path)) {  // for example if the sync of an earlier publication failed
      // A directory cannot be renamed onto another. `find` renames the old one back if this one does not take its
      // place.
      fs::remove_all(replaced_name(path));
      storage::rename_durably(path, replaced_name(path));
      pass("mid-replace");
    }
    storage::rename_durably(temporary, path);
    durable.push_back(manifest.step);
  }

  /// Updates `latest` and deletes expired checkpoints. Rank 0. A failure here does not invalidate the checkpoint.
  void tidy(const fs::path& path) {
    pass("after-rename");
    pass("before-latest");
    storage::require_ownership();
    storage::write_text_atomically(directory / kLatestName, path.filename().string() + "\n");
    fs::remove_all(replaced_name(path));
    const std::int64_t best = best_of(manifest).value_or(Best()).step;
    for (const std::int64_t step : expired(durable, settings, best)) {
      remove(directory / directory_name(step));
      durable.erase(std::find(durable.begin(), durable.end(), step));
    }
    for (const fs::path& old : expired_abandoned(directory, durable.size(), settings)) {
      if (remove(old)) log::info("{}: deleted, the run has newer checkpoints", old.string());
    }
  }

  /// Deletes an expired checkpoint. False, with a warning, if that fails.
  bool remove(const fs::path& old) const {
    // Rename first, durably: a partly deleted directory must not look like a checkpoint.
    const fs::path doomed = old.string() + ".deleted.tmp";
    storage::require_ownership();
    std::error_code failed;
    fs::rename(old, doomed, failed);
    if (!failed) storage::sync_directory(directory);
    pass("mid-delete");
    if (!failed) fs::remove_all(doomed, failed);
    if (failed) log::warning("{}: cannot be deleted ({}); delete it manually", old.string(), failed.message());
    return !failed;
  }

  /// Second phase. Rank 0, in a thread.
  void publish_and_tidy() {
    const trace::Scope scope(trace::Row::writer, "publish checkpoint");
    const fs::path path = directory / directory_name(manifest.step);
    failure = parallel::attempt([&] { publish(path); });
    if (!failure) {
      const auto untidy = parallel::attempt([&] { tidy(path); });
      if (untidy && untidy->code == ExitCode::io)
        log::warning("{}: {} (the checkpoint itself is durable)", directory.string(), untidy->message);
      else
        failure = untidy;
    }
    done = true;
  }

  Report conclude(const std::optional<parallel::Failure>& agreed);
};

Writer::Writer(const parallel::Communicator& world, fs::path directory, const Settings& settings,
               const Registry& registry, const kernels::Execution& execution, const fs::path& resumed_from,
               const parallel::Communicator* place) {
  if (place == nullptr) {
    require_writable(world, directory);
    place = &world;
  } else {
    parallel::on_all(world, [&] { require_writable(*place, directory); });
  }
  const std::string digest = common_digest(registry);
  const std::string root_digest = world.broadcast(digest);
  parallel::on_all(world, [&] {
    if (digest != root_digest) throw error(ExitCode::internal, "it registered other tensors than rank 0");
  });
  state_ = std::make_unique<State>(world, *place, std::move(directory), settings, registry, execution);
  State& state = *state_;
  const auto unlisted = state.attempt_once([&] {
    std::error_code elsewhere;
    const bool here = !resumed_from.empty() &&
                      fs::equivalent(resumed_from.parent_path().empty() ? fs::path(".") : resumed_from.parent_path(),
                                     state.directory, elsewhere);
    const std::int64_t resumed_step = here ? step_of(resumed_from.filename().string()) : -1;
    for (const std::int64_t step : steps_in(state.directory)) {
      if (step <= resumed_step)
        state.durable.push_back(step);
      else
        set_aside(state.directory / directory_name(step));
    }
    state.last_durable = resumed_step;
    if (const std::size_t n = abandoned_in(state.directory).size(); n > 0)
      log::info("{}: {} abandoned checkpoint{} (*.abandoned), to be deleted when the run has newer ones",
                state.directory.string(), n, n == 1 ? "" : "s");
  });
  if (unlisted) unlisted->raise();
  world.broadcast(&state.last_durable, sizeof state.last_durable);
}

Writer::~Writer() = default;

std::int64_t Writer::staging_bytes(const Settings& settings, const Registry& registry) {
  std::int64_t all = 0, largest_piece = 0;
  for (const Tensor& tensor : registry.tensors()) {
    if (tensor.owned.size() == 0) continue;
    all += aligned(tensor.owned.size() * tensor.row_bytes());
    if (tensor.gather || tensor.on_device)
      largest_piece =
          std::max(largest_piece, std::min(tensor.owned.size(), storage::piece_rows(tensor.type, owned_shape(tensor))) *
                                      tensor.row_bytes());
  }
  return settings.staging == Staging::full ? all : largest_piece;
}

bool Writer::busy() const { return state_->phase != State::Phase::idle; }
bool Writer::shard_done() const { return !busy() || state_->done; }
std::int64_t Writer::phases_done() const { return state_->phases - (shard_done() ? 0 : 1); }
bool Writer::allows_advance(std::int64_t least_phases_done) const {
  return busy() && least_phases_done >= state_->phases;
}
const Manifest& Writer::manifest() const { return state_->manifest; }
std::int64_t Writer::last_durable() const { return state_->last_durable; }
double Writer::last_seconds() const { return state_->last_seconds; }

bool Writer::start(Manifest manifest) {
  const trace::Scope scope(trace::Row::host, "start checkpoint");
  State& state = *state_;
  WEFT_ASSERT(!busy());
  if (manifest.step == state.last_durable) return false;
  state.begin = Clock::now();
  state.manifest = std::move(manifest);
  state.manifest.format_version = kFormatVersion;
  state.manifest.world = state.world.size();
  state.shard = {};
  state.open_temporary(false);
  if (state.failure) {
    state.done = true;
  } else if (state.settings.staging == Staging::chunked) {
    constexpr int kOnlyThisThread = 1;  // copies from the device
    state.write([&state](std::size_t t, parallel::Range rows) { return state.live(t, rows); }, kOnlyThisThread);
  } else {
    state.stage_all();
    state.thread = std::thread([&state] {
      state.write([&state](std::size_t t, parallel::Range rows) { return state.staged(t, rows); },
                  storage::kWritingThreads);
    });
  }
  state.pause = seconds_since(state.begin);
  return true;
}

bool Writer::start_copy(const Manifest& complete, std::vector<ShardSource> sources) {
  State& state = *state_;
  WEFT_ASSERT(!busy());
  if (complete.step == state.last_durable) return false;
  state.begin = Clock::now();
  state.manifest = complete;
  state.open_temporary(true);
  if (state.failure)
    state.done = true;
  else
    state.thread = std::thread([&state, sources = std::move(sources)] { state.copy(sources); });
  state.pause = seconds_since(state.begin);
  return true;
}

std::optional<Report> Writer::poll() {
  if (!busy()) return std::nullopt;
  std::int64_t done = state_->done ? 1 : 0;
  state_->world.minimum({&done, 1});
  if (done == 0) return std::nullopt;
  return advance();
}

std::optional<Report> Writer::finish() {
  std::optional<Report> report;
  while (busy()) report = advance();
  return report;
}

std::optional<Report> Writer::advance() {
  State& state = *state_;
  if (!busy()) return std::nullopt;
  const auto begin = Clock::now();
  if (state.thread.joinable()) state.thread.join();
  const std::optional<parallel::Failure> failure = parallel::agree(state.world, state.failure);
  if (!failure && state.phase == State::Phase::writing) {
    if (!state.copying) state.collect_shards();
    state.phase = State::Phase::publishing;
    ++state.phases;
    if (state.publishes()) {
      state.done = false;
      state.thread = std::thread([&state] { state.publish_and_tidy(); });
    } else {
      for (const char* point :
           {"before-manifest", "before-rename", "mid-replace", "after-rename", "before-latest", "mid-delete"})
        state.pass(point);
    }
    state.pause += seconds_since(begin);
    return std::nullopt;
  }
  state.phase = State::Phase::idle;
  state.pause += seconds_since(begin);
  return state.conclude(failure);
}

Report Writer::State::conclude(const std::optional<parallel::Failure>& agreed) {
  Report report;
  report.step = manifest.step;
  report.path = directory / directory_name(report.step);
  report.durable = !agreed;
  report.copied = copying;
  // All ranks have agreed: no thread writes there any more.
  if (agreed && publishes()) {
    std::error_code failed;
    fs::remove_all(temporary, failed);
    if (failed) log::warning("{}: cannot be removed ({})", temporary.string(), failed.message());
  }
  // Times of the slowest rank: the same on every rank.
  std::int64_t microseconds[] = {std::int64_t(seconds_since(begin) * 1e6), std::int64_t(pause * 1e6),
                                 std::int64_t(shard_seconds * 1e6)};
  world.maximum(microseconds);
  std::int64_t direct = shard.direct ? 1 : 0;
  world.minimum({&direct, 1});
  report.direct = direct == 1;
  report.seconds = static_cast<double>(microseconds[0]) * 1e-6;
  report.pause = static_cast<double>(microseconds[1]) * 1e-6;
  report.shard_seconds = static_cast<double>(microseconds[2]) * 1e-6;
  if (report.durable) {
    for (const ShardEntry& entry : manifest.shards) report.bytes += entry.bytes;
    failures = 0;
    last_durable = report.step;
    last_seconds = report.seconds;
    if (!report.direct && !copying && !cache_was_reported && world.rank() == 0)
      log::info("{}: written through the page cache, its file system has no direct I/O", report.path.string());
    cache_was_reported = cache_was_reported || !report.direct;
    return report;
  }

  if (agreed->code != ExitCode::io) throw Error(agreed->code, agreed->message, KnownTo::all_ranks);
  report.failure = agreed->message;
  ++failures;
  const std::int64_t allowed = std::max<std::int64_t>(1, settings.failures_allowed);
  if (failures >= allowed)
    throw collective_error(ExitCode::io,
                           "{}: {} checkpoint{} in a row could not be written ({}); the newest valid one is {}",
                           directory.string(), failures, failures == 1 ? "" : "s", report.failure,
                           last_durable < 0 ? "none" : directory_name(last_durable));
  if (world.rank() == 0)
    log::warning(
        "{}: not written, failure {} of {} in a row ({}; {} bytes free); training continues, {}", report.path.string(),
        failures, allowed, report.failure, format::grouped(storage::free_bytes(directory)),
        last_durable < 0 ? "there is no checkpoint yet" : "the newest checkpoint is " + directory_name(last_durable));
  return report;
}

std::string Report::line() const {
  if (!durable) return fmt::format("checkpoint {}: not written ({})", directory_name(step), failure);
  if (copied)
    return fmt::format("checkpoint {}: copied to the run directory, {:.3g} GB in {:.2f} s ({:.2f} GB/s)",
                       directory_name(step), static_cast<double>(bytes) * 1e-9, seconds, gigabytes_per_second());
  return fmt::format("checkpoint {}: {:.3g} GB in {:.2f} s ({:.2f} GB/s), training paused {:.3f} s",
                     directory_name(step), static_cast<double>(bytes) * 1e-9, seconds, gigabytes_per_second(), pause);
}

void require_writable(const parallel::Communicator& world, const fs::path& directory) {
  const auto refuse = [&](const parallel::Failure& failure) {
    throw collective_error(ExitCode::io, "{}: checkpoints cannot be written there ({}); choose another --output",
                           directory.string(), failure.message);
  };
  const fs::path probe = directory / ".probe.tmp";
  if (const auto failure = parallel::attempt_on_root(world, [&] {
        storage::make_directory(directory);
        storage::write_text(probe, "");
      }))
    refuse(*failure);
  // On every rank: also finds a directory that is not shared between nodes.
  const auto invisible = parallel::agree(world, parallel::attempt([&] { storage::sync_file(probe); }));
  if (const auto failure = parallel::attempt_on_root(world, [&] { fs::remove(probe); })) refuse(*failure);
  if (invisible) refuse(*invisible);
}

}  // namespace weft::checkpoint

// SPDX-License-Identifier: Apache-2.0
//
// What checkpoints cost and how often they are written, node-local checkpoints, and the verification of kept ones.
// Every rank is a node of its own with its own directory.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/checkpoints.hpp"
#include "checkpoint/lease.hpp"
#include "checkpoint/resume.hpp"
#include "parallel/signals.hpp"
#include "storage/durable.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/scratch.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
using testing::manifest_of;
using testing::Sample;
using weft::testing::execution;
using namespace std::chrono_literals;

namespace {

const parallel::Communicator& world() { return weft::testing::world().all(); }
bool root() { return world().rank() == 0; }

/// A temporary directory that all ranks share, with a run directory and a disk for each node. Collective.
struct Scratch : weft::testing::Scratch {
  parallel::Communicator node = world().split(world().rank(), 0);
  Scratch() {
    if (root()) fs::create_directories(checkpoints());
    fs::create_directories(disk());
    world().barrier();
  }
  fs::path run() const { return path / "run"; }
  fs::path checkpoints() const { return run() / "checkpoints"; }
  fs::path disk() const { return path / ("disk_" + std::to_string(world().rank())); }
  /// Rank 0.
  std::unique_ptr<Starts> starts() const { return root() ? std::make_unique<Starts>(run()) : nullptr; }
  Settings settings() const {
    Settings settings;
    settings.local = disk().string();
    return settings;
  }
  /// The only node directory on the disk of this rank.
  fs::path node_directory() const {
    std::vector<fs::path> found;
    for (const auto& run : fs::directory_iterator(disk()))
      for (const auto& host : fs::directory_iterator(run)) found.push_back(host.path());
    REQUIRE(found.size() == 1);
    return found[0];
  }
  bool disk_is_empty() const { return fs::is_empty(disk()); }
};

/// Collects the lines of this rank during its lifetime.
struct Lines {
  std::vector<std::string> all;
  Lines() {
    log::set_sink([this](log::Level, std::string_view line) { all.emplace_back(line); });
  }
  ~Lines() {
    log::set_sink([](log::Level, std::string_view) {});
  }
  std::int64_t count(const std::string& text) const {
    return std::count_if(all.begin(), all.end(), [&](const std::string& line) { return line.find(text) != line.npos; });
  }
};

void flip(const fs::path& path, std::int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 0x10));
}

/// Writes checkpoints of these steps as a run does: first on the nodes, then in the run directory. `copy`: of each but
/// the last; the run ends without a close, as after a kill.
void write_on_nodes(const Scratch& scratch, Sample& sample, const std::vector<std::int64_t>& steps,
                    std::int64_t fence = 0) {
  const fs::path here = begin_local(world(), scratch.node, scratch.checkpoints(), scratch.disk().string());
  Writer writer(world(), here, Settings(), sample.registry, execution(), {}, &scratch.node);
  for (const std::int64_t step : steps) {
    sample.fill(step);
    Manifest manifest = manifest_of(step);
    manifest.fence = fence;
    REQUIRE(writer.start(std::move(manifest)));
    const auto report = writer.finish();
    REQUIRE(report);
    REQUIRE(report->durable);
  }
}

/// Writes to the run directory.
void write_shared(const Scratch& scratch, Sample& sample, std::int64_t step) {
  Writer writer(world(), scratch.checkpoints(), Settings(), sample.registry, execution());
  sample.fill(step);
  writer.start(manifest_of(step));
  REQUIRE(writer.finish()->durable);
}

/// The step from which the run would resume, after the bits of the state have been compared; -1: none.
std::int64_t resumed_step(const Scratch& scratch, Sample& sample) {
  copy_left_on_nodes(world(), scratch.node, scratch.checkpoints(), scratch.settings());
  const auto found = find(world(), scratch.checkpoints(), "auto", Verify::full);
  if (!found) return -1;
  sample.clear();
  load(world(), *found, sample.registry, execution());
  CHECK(sample.holds(found->manifest.step));
  return found->manifest.step;
}

}  // namespace

TEST_CASE("the interval minimises the expected time of a run with failures") {
  // Expected time per second of work, up to constants (Daly's model): (exp((interval + delay) / M) - 1) / interval.
  for (const double delay : {0.01, 1.0, 60.0, 1800.0}) {
    const double between = 86400;
    const auto cost = [&](double interval) { return std::expm1((interval + delay) / between) / interval; };
    const double best = best_interval(delay, between);
    CHECK(cost(best) <= cost(0.8 * best));
    CHECK(cost(best) <= cost(1.25 * best));
    // Daly's series is within a fraction of a per cent of the minimum.
    double least = cost(best);
    for (double interval = 0.5 * best; interval < 2 * best; interval *= 1.001) least = std::min(least, cost(interval));
    CHECK(cost(best) <= least * (1 + 1e-5));
  }
  CHECK(best_interval(3, 1) == 1);
}

TEST_CASE("the interval follows the measured delay, and a checkpoint is requested once per interval") {
  Settings settings;
  settings.every = kAutomatic;
  settings.mean_time_between_failures = 10;
  Lines lines;
  Interval interval(settings, {.duration = 2, .delay = 2, .measured = false});
  CHECK(interval.seconds() == doctest::Approx(best_interval(2, 36000)));
  CHECK(lines.count("estimated") == 1);
  const auto begin = Clock::now();
  interval.note_start(begin);
  CHECK(!interval.due(begin + 100s));
  CHECK(interval.due(begin + 400s));
  CHECK(!interval.due(begin + 401s));  // requested already: the ranks act two steps later
  interval.note_start(begin + 402s);
  CHECK(!interval.due(begin + 403s));
  CHECK(interval.due(begin + 802s));

  // 0.1 s of pause; 4 steps of 0.3 s instead of 0.2 s while it was written.
  for (int i = 0; i < 10; ++i) interval.note_step(0.2, false);
  for (int i = 0; i < 4; ++i) interval.note_step(0.3, true);
  interval.note_durable(1.2, 0.1);
  CHECK(interval.cost().measured);
  CHECK(interval.cost().duration == doctest::Approx(1.2));
  CHECK(interval.cost().delay == doctest::Approx(0.5));
  CHECK(interval.seconds() == doctest::Approx(best_interval(0.5, 36000)));
  CHECK(lines.count("measured") == 1);

  // No delay at all: still not before the previous checkpoint is durable.
  Interval free(settings, {.duration = 5, .delay = 0, .measured = true});
  CHECK(free.seconds() == 5);
  // A number of steps: never by time.
  Interval by_steps(Settings(), {.duration = 1, .delay = 1, .measured = true});
  CHECK(!by_steps.due(begin + 10000h));
  CHECK(by_steps.seconds() == 0);
}

TEST_CASE("the cost is estimated alike on all ranks, and the measured one survives the job") {
  const Scratch scratch;
  const Cost cost = estimate_cost(world(), scratch.checkpoints(), 50'000'000 * (1 + world().rank()));
  CHECK(cost.duration > 0);
  CHECK(!cost.measured);
  Cost first = cost;
  world().broadcast(&first, sizeof first);
  CHECK(first.duration == cost.duration);
  world().barrier();
  CHECK(fs::is_empty(scratch.checkpoints()));  // the probe leaves nothing
  world().barrier();

  if (root()) {
    Starts starts(scratch.run());
    CHECK(!starts.last_cost());
    starts.begin(0, "auto", false);
    starts.note_checkpoint(10, {.duration = 3, .delay = 1, .measured = true});
    starts.note_checkpoint(20, {.duration = 4, .delay = 2, .measured = true});
    std::ofstream(scratch.run() / "starts.jsonl", std::ios::app)
        << "{\"checkpoint\": 30, \"seconds\": \"long\"}\n{\"checkpoint\": 4";  // unusable, torn
    const auto last = Starts(scratch.run()).last_cost();
    REQUIRE(last);
    CHECK(last->duration == 4);
    CHECK(last->delay == 2);
  }
}

TEST_CASE("checkpoints reach the run directory through the nodes, bit for bit, and leave nothing there") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  Settings settings = scratch.settings();
  {
    const auto starts = scratch.starts();
    Checkpoints checkpoints(world(), scratch.node, scratch.checkpoints(), settings, sample.registry, execution(), {},
                            starts.get(), false);
    for (std::int64_t step = 1; step <= 40; ++step) {
      sample.fill(step);
      std::vector<std::int64_t> least = checkpoints.progress();
      world().minimum(least);
      checkpoints.advance(least);
      if (step % 10 == 0) checkpoints.start(manifest_of(step));
    }
    sample.clear();  // the writer has its copy
    checkpoints.finish();
    CHECK(checkpoints.last_durable() == 40);
    CHECK(checkpoints.expected_seconds() > 0);
    CHECK(fs::exists(scratch.node_directory() / directory_name(40) / shard_name(world().rank())));
    checkpoints.close();
  }
  CHECK(scratch.disk_is_empty());
  world().barrier();
  CHECK(resumed_step(scratch, sample) == 40);
  if (root()) CHECK(Starts(scratch.run()).last_cost().has_value());
}

TEST_CASE("a newer checkpoint on the nodes is copied and used; an older one is not") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_shared(scratch, sample, 10);
  write_on_nodes(scratch, sample, {20, 30});
  CHECK(resumed_step(scratch, sample) == 30);
  CHECK(resumed_step(scratch, sample) == 30);  // again: it is in the run directory now

  const Scratch other;
  write_on_nodes(other, sample, {5, 7});
  write_shared(other, sample, 10);
  CHECK(resumed_step(other, sample) == 10);
  world().barrier();
  CHECK(!fs::exists(other.checkpoints() / directory_name(7)));
}

TEST_CASE("a checkpoint that is not complete or damaged on the nodes is reported, and an older one is used") {
  Sample sample(world(), 1);
  const int last = world().size() - 1;
  {  // a node is lost
    const Scratch scratch;
    write_shared(scratch, sample, 10);
    write_on_nodes(scratch, sample, {20});
    if (world().rank() == last) fs::remove_all(scratch.disk());
    world().barrier();
    Lines lines;
    CHECK(resumed_step(scratch, sample) == 10);
    if (root() && last > 0) CHECK(lines.count("is on no node of this job") == 1);
  }
  {  // a damaged shard, a missing shard, a damaged manifest of the newest: the older one on the nodes
    for (const std::string& file : {shard_name(last), std::string("missing"), std::string(kManifestName)}) {
      const Scratch scratch;
      write_shared(scratch, sample, 10);
      write_on_nodes(scratch, sample, {20, 30});
      if (world().rank() == last) {
        const fs::path step = scratch.node_directory() / directory_name(30);
        if (file == "missing")
          fs::remove(step / shard_name(last));
        else
          flip(step / file, static_cast<std::int64_t>(fs::file_size(step / file) / 2));
      }
      world().barrier();
      Lines lines;
      CHECK(resumed_step(scratch, sample) == 20);
      if (root()) CHECK(lines.count("step_00000030 in checkpoint.local cannot be used") == 1);
    }
  }
}

TEST_CASE("a checkpoint that a run wrote after it had lost the directory is not copied; the copy names its owner") {
  Sample sample(world(), 1);
  for (const std::int64_t fence : {1, 2}) {
    const Scratch scratch;
    write_shared(scratch, sample, 10);
    for (int owner = 1; owner <= 2; ++owner) {
      Lease lease(world(), scratch.run(), {});
      REQUIRE(lease.fence() == owner);
      if (root()) lease.begin_at(10);
      world().barrier();
    }
    const Lease lease(world(), scratch.run(), {});
    write_on_nodes(scratch, sample, {20}, fence);
    Lines lines;
    copy_left_on_nodes(world(), scratch.node, scratch.checkpoints(), scratch.settings(), &lease);
    const auto found = find(world(), scratch.checkpoints(), "auto", Verify::full, Leftovers::remove, &lease);
    REQUIRE(found);
    if (fence == 1) {
      CHECK(found->manifest.step == 10);
      if (root()) CHECK(lines.count("a run that had lost the directory wrote it") == 1);
    } else {
      CHECK(found->manifest.step == 20);
      CHECK(found->manifest.fence == 3);
      CHECK(found->manifest.owner == lease.token());
    }
    world().barrier();
  }
}

TEST_CASE("a newer checkpoint in the run directory that cannot be read is not replaced by one on the nodes") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_shared(scratch, sample, 10);
  write_on_nodes(scratch, sample, {20});
  // A manifest that is a link to itself cannot be read by any user.
  if (root()) {
    fs::create_directories(scratch.checkpoints() / directory_name(30));
    fs::create_symlink(kManifestName, scratch.checkpoints() / directory_name(30) / kManifestName);
  }
  world().barrier();
  CHECK_THROWS_AS(resumed_step(scratch, sample), Error);
  CHECK(!fs::exists(scratch.checkpoints() / directory_name(20)));
  world().barrier();
}

TEST_CASE("a checkpoint on the nodes is not given up because the run directory is full") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  write_shared(scratch, sample, 10);
  write_on_nodes(scratch, sample, {20, 30});
  const parallel::Signals signals;  // ignores SIGXFSZ: exceeding the limit becomes an error of the write
  rlimit former;
  getrlimit(RLIMIT_FSIZE, &former);
  rlimit small = former;
  if (world().rank() == world().size() - 1) small.rlim_cur = 100'000;
  setrlimit(RLIMIT_FSIZE, &small);
  try {
    copy_left_on_nodes(world(), scratch.node, scratch.checkpoints(), scratch.settings());
    FAIL("continued");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    CHECK(std::string(failure.what()).find("step_00000030 on the nodes is newer and cannot be copied") !=
          std::string::npos);
  }
  setrlimit(RLIMIT_FSIZE, &former);
  CHECK(resumed_step(scratch, sample) == 30);
}

TEST_CASE("a damaged copy in the run directory is replaced by the one on the nodes") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_shared(scratch, sample, 10);
  write_on_nodes(scratch, sample, {20});
  CHECK(resumed_step(scratch, sample) == 20);
  if (root()) flip(scratch.checkpoints() / directory_name(20) / shard_name(0), 5000);
  world().barrier();
  CHECK(resumed_step(scratch, sample) == 20);
}

TEST_CASE("the disk of a node that fails during the run costs the checkpoints on it, not the run") {
  const Scratch scratch;
  Sample sample(world(), 1);
  {
    const auto starts = scratch.starts();
    Checkpoints checkpoints(world(), scratch.node, scratch.checkpoints(), scratch.settings(), sample.registry,
                            execution(), {}, starts.get(), false);
    const auto begin = [&](std::int64_t step) {
      sample.fill(step);
      checkpoints.start(manifest_of(step));
    };
    begin(10);
    checkpoints.finish();
    begin(20);
    begin(30);  // 20 is complete on the nodes, and not yet copied
    if (world().rank() == world().size() - 1) fs::remove_all(scratch.disk());
    world().barrier();
    Lines lines;
    checkpoints.finish();
    CHECK(checkpoints.last_durable() >= 10);
    if (root()) CHECK(lines.count("not written, failure") >= 1);
    begin(40);
    checkpoints.finish();
    CHECK(checkpoints.last_durable() == 40);
    checkpoints.close();
  }
  CHECK(resumed_step(scratch, sample) == 40);
}

TEST_CASE("a new start does not use what an earlier one has left on the nodes") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_shared(scratch, sample, 10);
  write_on_nodes(scratch, sample, {20});
  const fs::path old = scratch.node_directory();
  // A start that resumes from step 10 on purpose.
  const fs::path here = begin_local(world(), scratch.node, scratch.checkpoints(), scratch.disk().string());
  CHECK(here != old);
  CHECK(!fs::exists(old));
  world().barrier();
  CHECK(resumed_step(scratch, sample) == 10);
}

TEST_CASE("a node-local directory that cannot be written is refused before the first step") {
  const Scratch scratch;
  if (world().rank() == world().size() - 1) {
    fs::remove_all(scratch.disk());
    std::ofstream(scratch.disk()) << "a file";
  }
  world().barrier();
  try {
    begin_local(world(), scratch.node, scratch.checkpoints(), scratch.disk().string());
    FAIL("accepted");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    CHECK(std::string(failure.what()).find("checkpoint.local") != std::string::npos);
  }
}

TEST_CASE("background verification reports a damaged checkpoint once and leaves it where it is") {
  const Scratch scratch;
  Sample sample(world(), 1);
  {
    Writer writer(world(), scratch.checkpoints(), Settings(), sample.registry, execution());
    for (const std::int64_t step : {10, 20}) {
      sample.fill(step);
      writer.start(manifest_of(step));
      writer.finish();
    }
  }
  const auto passes = [](const Scrub& scrub, std::int64_t more) {
    const std::int64_t until = scrub.result().passes + more;
    while (scrub.result().passes < until) std::this_thread::sleep_for(1ms);
  };
  if (root()) {
    Lines lines;
    {
      const std::uint64_t progress = noted_progress();
      Scrub scrub(scratch.checkpoints(), 0.001);
      passes(scrub, 2);
      CHECK(noted_progress() == progress);  // it would keep a hanging job alive
      CHECK(scrub.result().damaged.empty());
      CHECK(scrub.result().checkpoints >= 4);
      CHECK(scrub.result().bytes > 0);
      flip(scratch.checkpoints() / directory_name(10) / shard_name(0), 5000);
      passes(scrub, 3);
      REQUIRE(scrub.result().damaged.size() == 1);
      CHECK(scrub.result().damaged[0].find("step_00000010: shard rank_00000.h5 differs") == 0);
      fs::remove(scratch.checkpoints() / directory_name(20) / kManifestName);
      passes(scrub, 2);
      REQUIRE(scrub.result().damaged.size() == 1);
      CHECK(scrub.result().unreadable.size() == 1);
      // Replaced by newer ones while it is read: nothing to report.
      fs::remove_all(scratch.checkpoints() / directory_name(20));
      passes(scrub, 2);
      CHECK(scrub.result().unreadable.size() == 1);
    }
    CHECK(lines.count("is damaged, shard rank_00000.h5 differs from its sha256") == 1);
    CHECK(fs::exists(scratch.checkpoints() / directory_name(10)));
    // It ends at once, also before its first pass.
    const auto begin = std::chrono::steady_clock::now();
    { const Scrub waiting(scratch.checkpoints(), 3600); }
    CHECK(std::chrono::steady_clock::now() - begin < 60s);
  }
}

}  // namespace weft::checkpoint

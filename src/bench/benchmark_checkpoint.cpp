// SPDX-License-Identifier: Apache-2.0
#include "bench/benchmark_checkpoint.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/system.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/failure.hpp"

namespace weft::bench {
namespace fs = std::filesystem;
namespace {

constexpr int kTries = 5;
constexpr std::int64_t kBlock = std::int64_t{1} << 20;

double median_of_tries(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + kTries / 2, values.end());
  return values[kTries / 2];
}

/// Collective: what `action` takes on the slowest rank.
double timed(const parallel::Communicator& world, const std::function<void()>& action) {
  world.barrier();
  const Clock::time_point begin = Clock::now();
  parallel::on_all(world, action);
  std::int64_t nanoseconds = (Clock::now() - begin) / std::chrono::nanoseconds(1);
  world.maximum({&nanoseconds, 1});
  return 1e-9 * static_cast<double>(nanoseconds);
}

/// Processor time of this process so far, in seconds.
double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Sum over the ranks of the processor time since `begin`. Collective.
double processor_seconds_since(double begin, const parallel::Communicator& world) {
  const auto mine = static_cast<std::int64_t>(1e6 * (processor_seconds() - begin));
  std::vector<std::int64_t> all(static_cast<std::size_t>(world.size()));
  world.all_gather(&mine, all.data(), sizeof mine);
  return 1e-6 * static_cast<double>(std::accumulate(all.begin(), all.end(), std::int64_t{0}));
}

/// A file as dd would write and read it: conv=fsync, bs=1M.
class PlainFile {
 public:
  explicit PlainFile(fs::path path)
      : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) fail("opening");
  }
  PlainFile(const PlainFile&) = delete;
  ~PlainFile() { ::close(descriptor_); }

  void write(const std::vector<char>& block, std::int64_t bytes) const {
    for (std::int64_t at = 0; at < bytes;) {
      const ssize_t done = ::pwrite(descriptor_, block.data(), piece(bytes - at), at);
      if (done < 0 && errno != EINTR) fail("writing");
      at += std::max<ssize_t>(0, done);
    }
    if (::fsync(descriptor_) != 0) fail("fsync");
  }
  void read(std::vector<char>& block, std::int64_t bytes) const {
    for (std::int64_t at = 0; at < bytes;) {
      const ssize_t done = ::pread(descriptor_, block.data(), piece(bytes - at), at);
      if (done == 0 || (done < 0 && errno != EINTR)) fail("reading");
      at += std::max<ssize_t>(0, done);
    }
  }

 private:
  static std::size_t piece(std::int64_t left) { return static_cast<std::size_t>(std::min(kBlock, left)); }
  [[noreturn]] void fail(const char* what) const {
    throw error(ExitCode::io, "{}: {} failed ({})", path_.string(), what, std::strerror(errno));
  }

  fs::path path_;
  int descriptor_;
};

/// Requests that a durable file is evicted from the page cache, so that reading it reads the disk.
void forget(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  ::close(file);
}

/// Before each measurement: waits until deleted files are removed from the disk and their pages are no longer cached. A
/// writer that starts right after a large file was deleted reuses its pages, which can be many times faster than memory
/// that a virtual machine must request from its host; the order of the measurements must not influence the rates.
/// Collective.
void wait_for_disk(const parallel::Communicator& world, std::int64_t bytes) {
  constexpr double kLongest = 3, kBytesPerSecond = 100e6;  // small files need less time
  world.barrier();
  ::sync();
  std::this_thread::sleep_for(
      std::chrono::duration<double>(std::min(kLongest, static_cast<double>(bytes) / kBytesPerSecond)));
}

void remove_all(const parallel::Communicator& world, const fs::path& path) {
  world.barrier();
  parallel::on_root(world, [&] { fs::remove_all(path); });
}

/// One copy of `bytes` from where the kernels run into host memory. Measured on a part of it: rates do not depend on
/// the size when that is far beyond the caches.
double copy_seconds(std::int64_t bytes, const kernels::Execution& execution, const parallel::Communicator& world) {
  const std::int64_t part = std::clamp<std::int64_t>(bytes, 1, std::int64_t{256} << 20);
  const device::Buffer<std::byte> from(part);
  const device::HostBuffer<std::byte> to(part);
  device::zero(execution, from.data(), part);
  std::memset(to.data(), 1, static_cast<std::size_t>(part));
  kernels::fence(execution);
  std::vector<double> seconds;
  for (int i = 0; i < kTries; ++i)
    seconds.push_back(timed(world, [&] {
      device::copy(execution, to.data(), from.data(), part, device::Direction::to_host);
      kernels::fence(execution);
    }));
  return median_of_tries(std::move(seconds)) * static_cast<double>(bytes) / static_cast<double>(part);
}

/// Makes steps until `finished` is true on all ranks, which is checked after each. Returns the mean duration of a step.
/// Collective.
double steps_until(const parallel::Communicator& world, const std::function<void()>& step,
                   const std::function<bool()>& finished) {
  const Clock::time_point begin = Clock::now();
  for (std::int64_t steps = 1;; ++steps) {
    step();
    std::int64_t all = finished() ? 1 : 0;
    world.minimum({&all, 1});
    if (all == 1) return seconds_since(begin) / static_cast<double>(steps);
  }
}

/// Writes a checkpoint of step 1 when the disk is idle. `before` is called before it starts; `wait` must call its
/// argument until that returns true. Collective.
checkpoint::Report write_checkpoint(const fs::path& directory, const checkpoint::Registry& registry,
                                    const kernels::Execution& execution, const parallel::Communicator& world,
                                    std::int64_t bytes, const std::function<void()>& before,
                                    const std::function<void(const std::function<bool()>& finished)>& wait) {
  checkpoint::Writer writer(world, directory, {}, registry, execution);
  checkpoint::Manifest manifest;
  manifest.step = 1;
  wait_for_disk(world, bytes);
  before();
  writer.start(manifest);
  std::optional<checkpoint::Report> report;
  wait([&] { return (report = writer.poll()).has_value(); });
  if (!report->durable) throw collective_error(ExitCode::io, "{}", report->line());
  return *report;
}

/// Measures writing during training: shards and plain files in turn. Collective.
void measure_while_training(const fs::path& directory, const checkpoint::Registry& registry,
                            const kernels::Execution& execution, const parallel::Communicator& world,
                            const std::vector<char>& block, const std::function<void()>& step,
                            CheckpointResult& result) {
  const std::int64_t bytes = result.bytes / world.size();
  std::vector<double> write, durable, plain, quiet_step, busy_step;
  for (int i = 0; i < kTries; ++i) {
    const auto before = [&] {
      int quiet = 0;
      constexpr int kQuietSteps = 3;
      quiet_step.push_back(steps_until(world, step, [&] { return ++quiet >= kQuietSteps; }));
    };
    const auto wait = [&](const std::function<bool()>& finished) {
      busy_step.push_back(steps_until(world, step, finished));
    };
    const checkpoint::Report report = write_checkpoint(directory, registry, execution, world, bytes, before, wait);
    write.push_back(report.shard_seconds);
    durable.push_back(report.seconds);
    remove_all(world, directory);

    parallel::on_root(world, [&] { fs::create_directories(directory); });
    wait_for_disk(world, bytes);
    std::atomic<bool> done{false};
    std::optional<parallel::Failure> failure;
    std::int64_t nanoseconds = 0;
    std::thread writing([&] {
      failure = parallel::attempt([&] {
        const Clock::time_point begin = Clock::now();
        PlainFile(directory / fmt::format("plain_{}", world.rank())).write(block, bytes);
        nanoseconds = (Clock::now() - begin) / std::chrono::nanoseconds(1);
      });
      done = true;
    });
    steps_until(world, step, [&] { return done.load(); });
    writing.join();
    if (const auto agreed = parallel::agree(world, failure)) agreed->raise();
    world.maximum({&nanoseconds, 1});
    plain.push_back(1e-9 * static_cast<double>(nanoseconds));
    remove_all(world, directory);
  }
  result.busy_write_seconds = median_of_tries(std::move(write));
  result.busy_durable_seconds = median_of_tries(std::move(durable));
  result.busy_plain_seconds = median_of_tries(std::move(plain));
  result.step_seconds = median_of_tries(std::move(quiet_step));
  result.slow_step_seconds = median_of_tries(std::move(busy_step));
}

}  // namespace

CheckpointResult measure_checkpoint(const fs::path& directory, const checkpoint::Registry& registry,
                                    const kernels::Execution& execution, const parallel::World& ranks,
                                    const std::function<void()>& step) {
  const parallel::Communicator& world = ranks.all();
  CheckpointResult result;
  result.writers = world.size();
  result.cores = usable_cpus();
  std::int64_t largest = registry.bytes();
  world.maximum({&largest, 1});
  result.copy_seconds = copy_seconds(largest, execution, world);
  // Pseudo-random, so that no file system can compress it.
  std::vector<char> block(static_cast<std::size_t>(kBlock));
  std::uint64_t state = 1 + static_cast<std::uint64_t>(world.rank());
  for (char& byte : block)
    byte = static_cast<char>((state = state * 6364136223846793005u + 1442695040888963407u) >> 56);

  std::vector<double> write, read, plain_write, plain_read, pause, processor, plain_processor;
  for (int i = 0; i < kTries; ++i) {
    // Polls like the training loop between steps.
    const auto wait = [](const std::function<bool()>& finished) {
      while (!finished()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    double begin = 0;
    const auto before = [&] {
      world.barrier();
      begin = processor_seconds();
    };
    const checkpoint::Report report = write_checkpoint(directory, registry, execution, world, largest, before, wait);
    processor.push_back(processor_seconds_since(begin, world));
    write.push_back(report.seconds);
    result.direct = report.direct;
    pause.push_back(report.pause);
    result.bytes = report.bytes;
    const fs::path step = directory / checkpoint::directory_name(1);
    forget(step / checkpoint::shard_name(world.rank()));
    wait_for_disk(world, largest);
    read.push_back(timed(world, [&] {
      checkpoint::load(world, checkpoint::open(world, step, checkpoint::Verify::full), registry, execution);
    }));
    remove_all(world, directory);

    fs::create_directories(directory);
    const fs::path path = directory / fmt::format("plain_{}", world.rank());
    std::optional<PlainFile> file;
    const std::int64_t bytes = result.bytes / world.size();
    wait_for_disk(world, largest);
    begin = processor_seconds();
    plain_write.push_back(timed(world, [&] { file.emplace(path).write(block, bytes); }));
    plain_processor.push_back(processor_seconds_since(begin, world));
    forget(path);
    wait_for_disk(world, largest);
    plain_read.push_back(timed(world, [&] { file->read(block, bytes); }));
    file.reset();
    remove_all(world, directory);
  }
  result.write_seconds = median_of_tries(std::move(write));
  result.read_seconds = median_of_tries(std::move(read));
  result.plain_write_seconds = median_of_tries(std::move(plain_write));
  result.plain_read_seconds = median_of_tries(std::move(plain_read));
  result.pause_seconds = median_of_tries(std::move(pause));
  result.write_processor_seconds = median_of_tries(std::move(processor));
  result.plain_write_processor_seconds = median_of_tries(std::move(plain_processor));
  measure_while_training(directory, registry, execution, world, block, step, result);
  return result;
}

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/log.hpp"
#include "checkpoint/directory.hpp"
#include "checkpoint/resume.hpp"
#include "checkpoint/writer.hpp"
#include "parallel/signals.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/test.hpp"

namespace {

/// Errors that system calls of this process return for files whose path contains `path`, `left` times.
struct Failing {
  std::string path;
  int number = 0;
  std::atomic<int> left{0};

  bool next(const std::string& name) {
    if (left <= 0 || name.find(path) == name.npos || left-- <= 0) return false;
    errno = number;
    return true;
  }
  bool next(int file) {
    if (left <= 0) return false;
    std::error_code ignored;
    return next(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string());
  }
} failing_open, failing_read;

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// These take the place of the C library's functions.
extern "C" int open(const char* path, int flags, ...) {
  static auto* const real = original<int(const char*, int, ...)>("open");
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return failing_open.next(std::string(path)) ? -1 : real(path, flags, mode);
}
extern "C" ssize_t read(int file, void* to, std::size_t bytes) {
  static auto* const real = original<ssize_t(int, void*, std::size_t)>("read");
  return failing_read.next(file) ? -1 : real(file, to, bytes);
}
extern "C" ssize_t pread(int file, void* to, std::size_t bytes, off_t at) {
  static auto* const real = original<ssize_t(int, void*, std::size_t, off_t)>("pread");
  return failing_read.next(file) ? -1 : real(file, to, bytes, at);
}
extern "C" ssize_t preadv(int file, const iovec* pieces, int count, off_t at) {
  static auto* const real = original<ssize_t(int, const iovec*, int, off_t)>("preadv");
  return failing_read.next(file) ? -1 : real(file, pieces, count, at);
}

namespace weft::checkpoint {
namespace fs = std::filesystem;
using testing::manifest_of;
using testing::Sample;
using weft::testing::execution;

namespace {

const parallel::Communicator& world() { return weft::testing::world().all(); }
bool root() { return world().rank() == 0; }

/// A temporary directory that all ranks share. Collective.
struct Scratch {
  fs::path path;
  Scratch() {
    std::string pattern = (fs::temp_directory_path() / "weft_checkpoint_XXXXXX").string();
    if (root()) REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path = world().broadcast(pattern);
  }
  ~Scratch() {
    world().barrier();
    if (root()) fs::remove_all(path);
  }
};

/// Collects the warnings of this rank during its lifetime.
struct Warnings {
  std::vector<std::string> lines;
  Warnings() {
    log::set_sink([this](log::Level level, std::string_view line) {
      if (level != log::Level::info) lines.emplace_back(line);
    });
  }
  ~Warnings() {
    log::set_sink([](log::Level, std::string_view) {});
  }
  bool mention(const std::string& text) const {
    return std::any_of(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.find(text) != line.npos; });
  }
};

Settings settings_of(Staging staging = Staging::full, std::int64_t keep = 2, std::int64_t keep_every = 0) {
  Settings settings;
  settings.staging = staging;
  settings.keep = keep;
  settings.keep_every = keep_every;
  return settings;
}

/// Writes checkpoints of these steps with a new writer. Collective over `group`.
void write_steps(const parallel::Communicator& group, const fs::path& directory, Sample& sample,
                 std::vector<std::int64_t> steps, const Settings& settings = settings_of(),
                 const fs::path& resumed_from = {}) {
  Writer writer(group, directory, settings, sample.registry, execution(), resumed_from);
  for (const std::int64_t step : steps) {
    sample.fill(step);
    REQUIRE(writer.start(manifest_of(step)));
    sample.clear();  // the writer has its copy
    const auto report = writer.finish();
    REQUIRE(report);
    REQUIRE(report->durable);
    REQUIRE(report->bytes > 0);
    REQUIRE(writer.last_durable() == step);
  }
}

/// Changes one byte. Call it on rank 0.
void flip(const fs::path& path, std::int64_t at, unsigned char mask = 0x10) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ mask));
}

ExitCode code_of_find(const fs::path& directory, const std::string& resume = "auto") {
  try {
    find(world(), directory, resume, Verify::full);
  } catch (const Error& failure) {
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.code();
  }
  return ExitCode::finished;
}

/// Collective: the barriers exclude concurrent changes by other ranks.
std::vector<std::string> names_in(const fs::path& directory) {
  world().barrier();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  world().barrier();
  return names;
}

}  // namespace

TEST_CASE("checkpoints of n ranks are read by m ranks bit for bit, for all grids") {
  Warnings warnings;
  for (int n = 1; n <= world().size(); ++n)
    for (int n_data = 1; n_data <= n; ++n_data) {
      if (n % n_data != 0) continue;
      const Scratch scratch;
      const bool writes = world().rank() < n;
      const parallel::Communicator writers = world().split(writes ? 0 : 1, world().rank());
      if (writes) {
        Sample sample(writers, n_data, 300'001);  // rows wider than a chunk
        write_steps(writers, scratch.path, sample, {5});
      }
      world().barrier();
      for (int m = 1; m <= world().size(); ++m)
        for (int m_data = 1; m_data <= m; ++m_data) {
          if (m % m_data != 0) continue;
          const bool reads = world().rank() < m;
          const parallel::Communicator readers = world().split(reads ? 0 : 1, world().rank());
          if (!reads) continue;
          Sample sample(readers, m_data, 300'001);
          sample.clear();
          const auto found = find(readers, scratch.path, "auto", Verify::full);
          REQUIRE(found);
          CHECK(found->manifest.step == 5);
          CHECK(found->manifest.world == n);
          load(readers, *found, sample.registry, execution());
          CHECK(sample.holds(5));
        }
    }
  CHECK(warnings.lines.empty());
}

TEST_CASE("the manifest contains all fields set by the caller") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {12});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  const Manifest &got = found->manifest, given = manifest_of(12);
  CHECK(got.tokens == given.tokens);
  CHECK(got.cursor == given.cursor);
  CHECK(got.grid == given.grid);
  CHECK(got.input == given.input);
  CHECK(got.libraries == given.libraries);
  CHECK(got.dataset_fingerprint == given.dataset_fingerprint);
  CHECK(got.extra == given.extra);
  CHECK(found->path == scratch.path / "step_00000012");
  CHECK(storage::read_text(scratch.path / "latest", 100) == "step_00000012\n");
}

TEST_CASE("the same state gives the same files") {
  const Scratch a, b;
  Sample sample(world(), 1, 300'001);
  write_steps(world(), a.path, sample, {3});
  write_steps(world(), b.path, sample, {3}, settings_of(Staging::chunked));
  CHECK(storage::read_text(a.path / "step_00000003/manifest.json", 1 << 20) ==
        storage::read_text(b.path / "step_00000003/manifest.json", 1 << 20));
}

TEST_CASE("chunked staging writes the same files, and packed tensors use their functions") {
  for (const Staging staging : {Staging::full, Staging::chunked}) {
    const Scratch scratch;
    Sample packed(world(), 1, 0, true), plain(world(), 1);
    write_steps(world(), scratch.path, packed, {7}, settings_of(staging));
    const auto found = find(world(), scratch.path, "auto", Verify::full);
    REQUIRE(found);
    plain.clear();
    load(world(), *found, plain.registry, execution());
    CHECK(plain.holds(7));  // the tensor is not inverted in the file
    packed.clear();
    load(world(), *found, packed.registry, execution());
    CHECK(packed.holds(7));
    CHECK(Writer::staging_bytes(settings_of(Staging::chunked), plain.registry) == 0);
    CHECK(Writer::staging_bytes(settings_of(), plain.registry) >= plain.registry.bytes());
  }
}

TEST_CASE("training continues while the thread writes, and poll completes on all ranks at once") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution());
  CHECK(!writer.finish());
  sample.fill(1);
  REQUIRE(writer.start(manifest_of(1)));
  CHECK(writer.busy());
  sample.fill(2);  // the next step overwrites the state
  std::optional<Report> report;
  while (!report) report = writer.poll();
  CHECK(report->durable);
  CHECK(report->seconds >= report->pause);
  CHECK(!writer.busy());
  CHECK(writer.shard_done());
  CHECK(!writer.start(manifest_of(1)));  // already durable
  sample.clear();
  load(world(), *find(world(), scratch.path, "auto", Verify::full), sample.registry, execution());
  CHECK(sample.holds(1));
}

TEST_CASE("a changed byte in shard or manifest is always detected (every 97th byte)") {
  if (world().size() > 2) return;  // the same checks, slower
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  const fs::path step = scratch.path / "step_00000001";
  for (const std::string& name : {std::string(kManifestName), shard_name(world().size() - 1)}) {
    const auto size = static_cast<std::int64_t>(fs::file_size(step / name));
    int silent = 0, trials = 0;
    for (std::int64_t at = 0; at < size; at += 97, ++trials) {
      world().barrier();
      if (root()) flip(step / name, at, static_cast<unsigned char>(1 << (trials % 8)));
      world().barrier();
      try {
        open(world(), step, Verify::full);
        ++silent;
      } catch (const Error& failure) {
        CHECK(failure.code() == ExitCode::io);
      }
      if (root()) flip(step / name, at, static_cast<unsigned char>(1 << (trials % 8)));
    }
    CAPTURE(name);
    CHECK(trials > 10);
    CHECK(silent == 0);
  }
  world().barrier();
  CHECK_NOTHROW(open(world(), step, Verify::full));
}

TEST_CASE("without digests, the checksums of HDF5 detect changed numbers") {
  if (world().size() > 1) return;
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  const fs::path step = scratch.path / "step_00000001", shard = step / shard_name(0);
  const auto size = static_cast<std::int64_t>(fs::file_size(shard));
  int refused = 0, silent = 0;
  for (std::int64_t at = 0; at < size; at += 97) {
    flip(shard, at);
    sample.clear();
    try {
      load(world(), open(world(), step, Verify::size), sample.registry, execution());
      silent += sample.holds(1) ? 0 : 1;
    } catch (const Error&) {
      ++refused;
    }
    flip(shard, at);
  }
  CHECK(refused > 10);
  CHECK(silent == 0);
}

TEST_CASE("torn, missing and foreign files are rejected with the reason, and the previous checkpoint is used") {
  const std::string last = shard_name(world().size() - 1);
  struct Damage {
    const char* reason;
    std::function<void(const fs::path& newest, const fs::path& before)> apply;
  };
  const std::vector<Damage> damages = {
      {"torn write", [&](const fs::path& newest,
                         const fs::path&) { fs::resize_file(newest / last, fs::file_size(newest / last) - 1); }},
      {"torn write", [&](const fs::path& newest, const fs::path&) { fs::resize_file(newest / last, 0); }},
      {"not the file", [&](const fs::path& newest,
                           const fs::path&) { fs::resize_file(newest / last, fs::file_size(newest / last) + 1); }},
      {"is missing", [&](const fs::path& newest, const fs::path&) { fs::remove(newest / last); }},
      {"manifest.json is missing",
       [&](const fs::path& newest, const fs::path&) { fs::remove(newest / kManifestName); }},
      {"manifest.json", [&](const fs::path& newest, const fs::path&) { fs::resize_file(newest / kManifestName, 0); }},
      {"manifest.json", [&](const fs::path& newest, const fs::path&) { fs::resize_file(newest / kManifestName, 200); }},
      {"is of step 1",
       [&](const fs::path& newest, const fs::path& before) {
         fs::copy_file(before / kManifestName, newest / kManifestName, fs::copy_options::overwrite_existing);
       }},
      {"sha256",
       [&](const fs::path& newest, const fs::path& before) {
         fs::copy_file(before / last, newest / last, fs::copy_options::overwrite_existing);
       }},
  };
  for (const Damage& damage : damages) {
    const Scratch scratch;
    Sample sample(world(), 1);
    write_steps(world(), scratch.path, sample, {1, 2});
    if (root()) damage.apply(scratch.path / "step_00000002", scratch.path / "step_00000001");
    world().barrier();
    Warnings warnings;
    const auto found = find(world(), scratch.path, "auto", Verify::full);
    REQUIRE(found);
    CHECK(found->manifest.step == 1);
    CAPTURE(damage.reason);
    CHECK(warnings.lines.size() == (root() ? 1 : 0));
    if (root()) {
      CAPTURE(warnings.lines.front());
      CHECK(warnings.mention(damage.reason));
      CHECK(warnings.mention("step_00000002: rejected"));
      CHECK(warnings.mention("trying step_00000001"));
    }
    // Requested by name, it is an error.
    CHECK(code_of_find(scratch.path, (scratch.path / "step_00000002").string()) == ExitCode::io);
  }
}

TEST_CASE("errors that pass do not discard a checkpoint: opening and reading are repeated") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  const auto last = shard_name(world().size() - 1);
  for (const auto& [failing, number] :
       {std::pair(&failing_read, EIO), {&failing_open, ESTALE}, {&failing_read, ESTALE}})
    for (const std::string& file : {std::string(kManifestName), last}) {
      world().barrier();
      failing->path = "step_00000002/" + file;
      failing->number = number;
      failing->left = 1;
      Warnings warnings;
      const auto found = find(world(), scratch.path, "auto", Verify::full);
      REQUIRE(found);
      CHECK(found->manifest.step == 2);
      CHECK(!warnings.mention("rejected"));
      CHECK((failing->left == 1 || warnings.mention("attempt 2 of 7")));  // the ranks divide the work
      // And while the verified checkpoint is read.
      failing->left = 1;
      sample.clear();
      load(world(), *found, sample.registry, execution());
      CHECK(sample.holds(2));
      failing->left = 0;
    }
}

TEST_CASE("a checkpoint that cannot be read is not taken for damaged: the run ends and names it") {
  if (world().size() != 2) return;  // waits 16 s
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  failing_read.path = "step_00000002/" + shard_name(0);
  failing_read.number = EIO;
  failing_read.left = 1'000'000;
  Warnings warnings;
  try {
    find(world(), scratch.path, "auto", Verify::full);
    FAIL("accepted");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    for (const char* part :
         {"step_00000002", "Input/output error", "not known to be damaged", "--resume", "step_00000001"})
      CHECK(std::string(failure.what()).find(part) != std::string::npos);
  }
  failing_read.left = 0;
  CHECK(!warnings.mention("rejected"));
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 2);
}

TEST_CASE("bytes that change between verification and loading are not used") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  write_steps(world(), scratch.path, sample, {1});
  const fs::path shard = scratch.path / "step_00000001" / shard_name(0);
  const auto size = static_cast<std::int64_t>(fs::file_size(shard));
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  // Metadata, numbers and a checksum of HDF5, which is not used here.
  for (const std::int64_t at : {std::int64_t{3}, std::int64_t{1000}, size / 2, size - 1}) {
    world().barrier();
    if (root()) flip(shard, at);
    world().barrier();
    sample.clear();
    std::string message;
    try {
      load(world(), *found, sample.registry, execution());
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::io);
      CHECK(failure.known_to() == KnownTo::all_ranks);
      message = failure.what();
    }
    CHECK(message.find("after it was verified") != std::string::npos);
    world().barrier();
    if (root()) flip(shard, at);
  }
  world().barrier();
  load(world(), *found, sample.registry, execution());
  CHECK(sample.holds(1));
}

TEST_CASE("while a checkpoint of the same step is replaced, the old one or the new one exists") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  const fs::path step = scratch.path / "step_00000002", replaced = replaced_name(step);
  // Interrupted between the two renames: the old one returns.
  if (root()) {
    fs::rename(step, replaced);
    fs::create_directories(step.string() + ".tmp");
  }
  world().barrier();
  Warnings warnings;
  CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 2);
  CHECK((!root() || warnings.mention("renamed back to step_00000002")));
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  // Interrupted after them: the new one remains.
  if (root()) fs::copy(step, replaced);
  world().barrier();
  CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 2);
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  // Replaced by the writer: step 2 appears again after it has been set aside.
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(), scratch.path / "step_00000001");
  if (root()) fs::rename(step.string() + ".abandoned", step);
  world().barrier();
  for (const bool fails : {true, false}) {
    fault::order(fails ? "mid-replace:0:2:enospc" : "");
    sample.fill(2);
    REQUIRE(writer.start(manifest_of(2)));
    CHECK(writer.finish()->durable == !fails);
    fault::order("");
    world().barrier();
    const auto found = find(world(), scratch.path, "auto", Verify::full);
    REQUIRE(found);
    CHECK(found->manifest.step == 2);
    sample.clear();
    load(world(), *found, sample.registry, execution());
    CHECK(sample.holds(2));
    CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002"});
  }
}

TEST_CASE("a shard of another step is detected without digests") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  const std::string last = shard_name(world().size() - 1);
  if (root())
    fs::copy_file(scratch.path / "step_00000001" / last, scratch.path / "step_00000002" / last,
                  fs::copy_options::overwrite_existing);
  world().barrier();
  const auto found = find(world(), scratch.path, "auto", Verify::size);
  REQUIRE(found);
  try {
    load(world(), *found, sample.registry, execution());
    FAIL("accepted");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    CHECK(std::string(failure.what()).find(last) != std::string::npos);
  }
}

TEST_CASE("a run starts from step 0 only if there is no checkpoint") {
  const Scratch scratch;
  CHECK(!find(world(), scratch.path / "absent", "auto", Verify::full));
  CHECK(!find(world(), scratch.path, "auto", Verify::full));
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2});
  CHECK(!find(world(), scratch.path, "never", Verify::full));
  CHECK(find(world(), scratch.path, (scratch.path / "step_00000001").string() + "/", Verify::full)->manifest.step == 1);
  CHECK(code_of_find(scratch.path, (scratch.path / "step_00000009").string()) == ExitCode::usage);
  Warnings warnings;
  world().barrier();
  if (root())
    for (const char* name : {"step_00000001", "step_00000002"})
      fs::resize_file(scratch.path / name / shard_name(0), 100);
  world().barrier();
  CHECK(code_of_find(scratch.path) == ExitCode::io);
}

TEST_CASE("files of an interrupted write are reported and removed, and a dangling `latest` is ignored") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  if (root()) {
    for (const char* name : {"step_00000002.tmp", "step_00000003.tmp"}) {
      fs::create_directories(scratch.path / name);
      std::ofstream(scratch.path / name / "rank_00000.h5") << "torn";
    }
    storage::write_text(scratch.path / "latest", "step_00000009\n");
    storage::write_text(scratch.path / "latest.tmp", "step");
  }
  world().barrier();
  Warnings warnings;
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  CHECK(found->manifest.step == 1);
  CHECK(warnings.lines.size() == (root() ? 3 : 0));
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
}

TEST_CASE("old checkpoints are deleted once the new one is durable, except multiples of keep_every") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {100, 200, 300, 400, 500}, settings_of(Staging::full, 2, 300));
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000300", "step_00000400", "step_00000500"});
  // The checkpoint resumed from is kept until two newer ones exist, even if `keep` is smaller.
  world().barrier();
  write_steps(world(), scratch.path, sample, {600}, settings_of(Staging::full, 0), scratch.path / "step_00000500");
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000500", "step_00000600"});
}

TEST_CASE("checkpoints newer than the one resumed from are renamed, so that histories never mix") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1, 2, 3}, settings_of(Staging::full, 5));
  Warnings warnings;
  write_steps(world(), scratch.path, sample, {2}, settings_of(Staging::full, 5), scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001", "step_00000002",
                                                           "step_00000002.abandoned", "step_00000003.abandoned"});
  CHECK(warnings.lines.size() == (root() ? 2 : 0));
}

TEST_CASE("abandoned checkpoints count as older than those of the run, and expire with them") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {10, 20, 30}, settings_of(Staging::full, 5));
  // A new run: of three checkpoints in all, its own stay.
  write_steps(world(), scratch.path, sample, {1}, settings_of(Staging::full, 3));
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000020.abandoned", "step_00000030.abandoned"});
  write_steps(world(), scratch.path, sample, {2}, settings_of(Staging::full, 3), scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000002", "step_00000030.abandoned"});
  write_steps(world(), scratch.path, sample, {3}, settings_of(Staging::full, 3), scratch.path / "step_00000002");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000002", "step_00000003"});
}

TEST_CASE("the checkpoint that --resume names is never deleted") {
  const Scratch scratch;
  Sample sample(world(), 1);
  Settings settings = settings_of();
  write_steps(world(), scratch.path, sample, {1, 2}, settings);
  settings.protected_step = 1;
  write_steps(world(), scratch.path, sample, {2, 3, 4, 5}, settings, scratch.path / "step_00000001");
  CHECK(names_in(scratch.path) ==
        std::vector<std::string>{"latest", "step_00000001", "step_00000004", "step_00000005"});
}

TEST_CASE("an optional tensor may be missing, superfluous or of another shape in a checkpoint, any other may not") {
  const auto tensor = [](std::vector<std::uint32_t>& values, const char* name) {
    return Tensor{.name = name,
                  .type = kernels::Scalar::u32,
                  .shape = {static_cast<std::int64_t>(values.size())},
                  .held = {0, static_cast<std::int64_t>(values.size())},
                  .owned = {0, root() ? static_cast<std::int64_t>(values.size()) : 0},
                  .data = values.data()};
  };
  std::vector<std::uint32_t> state{1, 2}, two{3, 4}, three{5, 6, 7};
  struct Case {
    std::vector<std::uint32_t>*written, *read;
  };
  for (const bool optional : {true, false})
    for (const Case one : {Case{&two, &three}, Case{&two, nullptr}, Case{nullptr, &three}}) {
      const Scratch scratch;
      Registry writes, reads;
      for (Registry* registry : {&writes, &reads}) {
        registry->add(tensor(state, "state"));
        if (optional) registry->make_optional("hint");
      }
      if (one.written != nullptr) writes.add(tensor(*one.written, "hint"));
      if (one.read != nullptr) reads.add(tensor(*one.read, "hint"));
      Writer writer(world(), scratch.path, settings_of(), writes, execution());
      writer.start(manifest_of(1));
      REQUIRE(writer.finish()->durable);
      state = {0, 0};
      const auto load_it = [&] {
        load(world(), *find(world(), scratch.path, "auto", Verify::full), reads, execution());
      };
      if (optional)
        CHECK_NOTHROW(load_it());
      else
        CHECK_THROWS_AS(load_it(), Error);
      CHECK(three == std::vector<std::uint32_t>{5, 6, 7});
      CHECK((state == std::vector<std::uint32_t>{1, 2}) == optional);
      state = {1, 2};
    }
}

TEST_CASE(
    "after a failed write the previous checkpoint remains, files are removed, and training continues up to a limit") {
  const parallel::Signals signals;  // ignores SIGXFSZ: exceeding the limit becomes an error of the write
  Settings settings = settings_of();
  settings.failures_allowed = 2;
  for (const Staging staging : {Staging::full, Staging::chunked})
    for (const rlim_t limit : {rlim_t{0}, rlim_t{3000}, rlim_t{100'000}}) {
      settings.staging = staging;
      const Scratch scratch;
      Sample sample(world(), 1, 300'001);
      write_steps(world(), scratch.path, sample, {1});
      Writer writer(world(), scratch.path, settings, sample.registry, execution(), scratch.path / "step_00000001");
      const auto write = [&](std::int64_t step, bool full_disk) {
        rlimit former;
        getrlimit(RLIMIT_FSIZE, &former);
        rlimit small = former;
        if (full_disk && world().rank() == world().size() - 1) small.rlim_cur = limit;  // on one rank
        sample.fill(step);
        setrlimit(RLIMIT_FSIZE, &small);
        std::optional<Report> report;
        ExitCode code = ExitCode::finished;
        writer.start(manifest_of(step));
        try {
          report = writer.finish();
        } catch (const Error& failure) {
          CHECK(failure.known_to() == KnownTo::all_ranks);
          code = failure.code();
        }
        setrlimit(RLIMIT_FSIZE, &former);
        return std::pair(report, code);
      };
      Warnings warnings;
      const auto failed = write(2, true).first;
      REQUIRE(failed);
      CAPTURE(failed->failure);
      CHECK(!failed->durable);
      CHECK(failed->failure.find("File too large") != std::string::npos);
      CHECK(warnings.lines.size() == (root() ? 1 : 0));
      CHECK((!root() || warnings.mention("bytes free")));
      CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
      CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 1);
      // The next one succeeds and resets the count of failures.
      CHECK(write(3, false).first->durable);
      sample.clear();
      load(world(), *find(world(), scratch.path, "auto", Verify::full), sample.registry, execution());
      CHECK(sample.holds(3));
      CHECK(!write(4, true).first->durable);
      CHECK(write(5, true).second == ExitCode::io);  // the second in a row ends the run
      CHECK(find(world(), scratch.path, "auto", Verify::full)->manifest.step == 3);
    }
}

TEST_CASE("a shard of several segments is digested during the write, also if the disk becomes full") {
  if (world().size() > 1) return;  // one rank only: 160 MB
  const parallel::Signals signals;
  const Scratch scratch;
  Sample sample(world(), 1, 8'000'001);
  write_steps(world(), scratch.path, sample, {1});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  REQUIRE(found);
  REQUIRE(found->manifest.shards[0].sha256.size() == 3);
  load(world(), *found, sample.registry, execution());
  CHECK(sample.holds(1));
  Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(), found->path);
  rlimit former;
  getrlimit(RLIMIT_FSIZE, &former);
  rlimit small = former;
  small.rlim_cur = 2 * storage::kDigestSegment;  // after two digested segments
  setrlimit(RLIMIT_FSIZE, &small);
  Warnings warnings;
  writer.start(manifest_of(2));
  const auto report = writer.finish();
  setrlimit(RLIMIT_FSIZE, &former);
  REQUIRE(report);
  CHECK(!report->durable);
  CHECK(report->failure.find("File too large") != std::string::npos);
  CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
}

TEST_CASE("a state that is not finite is never written") {
  const Scratch scratch;
  Sample sample(world(), 1);
  write_steps(world(), scratch.path, sample, {1});
  for (const Staging staging : {Staging::full, Staging::chunked})
    for (const char* name :
         {"encoder_0/weight", "encoder_0/weight.first_moment", "decoder_0/weight", "statistics/mean_inputs"}) {
      Writer writer(world(), scratch.path, settings_of(staging), sample.registry, execution(),
                    scratch.path / "step_00000001");
      sample.fill(2);
      const Tensor& tensor = *sample.registry.find(name);
      if (tensor.owned.size() > 0)  // every owner makes its last number infinite or NaN
        std::memset(static_cast<char*>(tensor.data) + tensor.held.size() * tensor.row_bytes() - 2, 0x7f, 1),
            std::memset(static_cast<char*>(tensor.data) + tensor.held.size() * tensor.row_bytes() - 1, 0x7f, 1);
      if (tensor.owned.size() > 0 &&
          tensor.type != kernels::Scalar::fp16) {  // 0x7f7f is a finite bf16: make it infinite
        unsigned char* end = static_cast<unsigned char*>(tensor.data) + tensor.held.size() * tensor.row_bytes();
        end[-2] = tensor.type == kernels::Scalar::fp64 ? 0xf0 : 0x80;
      }
      writer.start(manifest_of(2));
      try {
        writer.finish();
        FAIL("accepted");
      } catch (const Error& failure) {
        CHECK(failure.code() == ExitCode::numeric);
        CHECK(failure.known_to() == KnownTo::all_ranks);
        CHECK(std::string(failure.what()).find(name) != std::string::npos);
      }
      CHECK(names_in(scratch.path) == std::vector<std::string>{"latest", "step_00000001"});
    }
}

TEST_CASE("after a full disk at any point of the protocol the previous checkpoint or the new one is intact") {
  for (const char* point : {"after-open", "mid-dataset", "before-close", "before-fsync", "before-manifest",
                            "before-rename", "after-rename", "before-latest", "mid-delete"})
    for (int rank = 0; rank < world().size(); ++rank) {
      const std::string name = point;
      const bool every_rank =
          name == "after-open" || name == "mid-dataset" || name == "before-close" || name == "before-fsync";
      if (rank > 0 && !every_rank) continue;  // only rank 0 writes there
      const Scratch scratch;
      Sample sample(world(), 1);
      write_steps(world(), scratch.path, sample, {1, 2});
      Warnings warnings;
      CAPTURE(name);
      CAPTURE(rank);
      {
        Writer writer(world(), scratch.path, settings_of(), sample.registry, execution(),
                      scratch.path / "step_00000002");
        sample.fill(3);
        fault::order(fmt::format("{}:{}:3:enospc", point, rank));
        writer.start(manifest_of(3));
        const auto report = writer.finish();
        fault::order("");
        world().barrier();
        const auto found = find(world(), scratch.path, "auto", Verify::full);
        REQUIRE(found);
        CHECK(found->manifest.step == (report->durable ? 3 : 2));
        if (root() && (rank == 0 || !report->durable)) CHECK(!warnings.lines.empty());
        load(world(), *found, sample.registry, execution());
        CHECK(sample.holds(found->manifest.step));
        // The next checkpoint succeeds.
        sample.fill(4);
        writer.start(manifest_of(4));
        CHECK(writer.finish()->durable);
      }
    }
}

TEST_CASE("inconsistent registries of the ranks are detected before a checkpoint is published") {
  const Scratch scratch;
  std::vector<float> numbers(4);
  const auto code = [&](Tensor tensor) {
    Registry registry;
    registry.add(std::move(tensor));
    try {
      Writer writer(world(), scratch.path, settings_of(), registry, execution());
      writer.start(manifest_of(1));
      writer.finish();
    } catch (const Error& failure) {
      CHECK(failure.known_to() == KnownTo::all_ranks);
      return failure.code();
    }
    return ExitCode::finished;
  };
  // A row without owner, a row with two owners, a different shape on one rank.
  const parallel::Range all{0, 4}, none{0, 0};
  CHECK(code({"w",
              kernels::Scalar::fp32,
              {4},
              all,
              root() ? parallel::Range{0, 3} : none,
              numbers.data(),
              false,
              {},
              {}}) == ExitCode::internal);
  if (world().size() > 1) {
    CHECK(code({"w", kernels::Scalar::fp32, {4}, all, all, numbers.data(), false, {}, {}}) == ExitCode::internal);
    CHECK(code({"w", kernels::Scalar::fp32, {4, root() ? 1 : 2}, none, none, nullptr, false, {}, {}}) ==
          ExitCode::internal);
  }
  CHECK(code({"w", kernels::Scalar::fp32, {4}, all, root() ? all : none, numbers.data(), false, {}, {}}) ==
        ExitCode::finished);
}

TEST_CASE("a run that ends with an error does not wait for its checkpoint") {
  const Scratch scratch;
  Sample sample(world(), 1, 300'001);
  sample.fill(1);
  {
    Writer writer(world(), scratch.path, settings_of(), sample.registry, execution());
    writer.start(manifest_of(1));
  }
  world().barrier();
  Warnings warnings;
  CHECK(!find(world(), scratch.path, "auto", Verify::full));
  CHECK(warnings.lines.size() == (root() ? 1 : 0));
}

TEST_CASE("a directory that cannot be written is refused before the first step") {
  const Scratch scratch;
  if (root()) storage::write_text(scratch.path / "file", "");
  world().barrier();
  try {
    require_writable(world(), scratch.path / "file" / "checkpoints");
    FAIL("accepted");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::io);
    CHECK(failure.known_to() == KnownTo::all_ranks);
  }
}

TEST_CASE("a checkpoint of other settings is a usage error") {
  const Scratch scratch;
  Sample sample(world(), 1), wider(world(), 1, 100);
  write_steps(world(), scratch.path, sample, {1});
  const auto found = find(world(), scratch.path, "auto", Verify::full);
  const auto code = [&](const Registry& registry, Load what) {
    try {
      load(world(), *found, registry, execution(), what);
    } catch (const Error& failure) {
      return failure.code();
    }
    return ExitCode::finished;
  };
  CHECK(code(wider.registry, Load::everything) == ExitCode::usage);
  Registry part;
  part.add(sample.registry.tensors()[0]);
  CHECK(code(part, Load::everything) == ExitCode::usage);
  CHECK(code(part, Load::part) == ExitCode::finished);
  Registry other;
  Tensor changed = sample.registry.tensors()[0];
  changed.shape[1] = 6;
  other.add(changed);
  CHECK(code(other, Load::part) == ExitCode::usage);
}

}  // namespace weft::checkpoint

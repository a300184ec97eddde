// SPDX-License-Identifier: Apache-2.0
//
// Damaged checkpoints are recognised, and errors that pass are not taken for damage.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <fstream>
#include <functional>

#include "base/error.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "tests/checkpoint/support.hpp"

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
using namespace testing;

namespace {

/// Changes one byte. Call it on rank 0.
void flip(const fs::path& path, std::int64_t at, unsigned char mask = 0x10) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ mask));
}

}  // namespace

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

}  // namespace weft::checkpoint

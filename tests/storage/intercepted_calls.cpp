// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/intercepted_calls.hpp"

#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <mutex>

namespace weft::testing {
namespace {
std::mutex mutex;
}  // namespace

std::vector<std::string> synced;
std::atomic<bool> no_locks = false;

}  // namespace weft::testing

extern "C" int flock(int descriptor, int operation) noexcept {
  if (!weft::testing::no_locks) return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
  errno = ENOLCK;
  return -1;
}

extern "C" int fsync(int descriptor) {
  {
    const std::lock_guard lock(weft::testing::mutex);
    std::error_code none;
    weft::testing::synced.push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), none));
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

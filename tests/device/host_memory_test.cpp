// SPDX-License-Identifier: Apache-2.0
//
// The memory that a node has left, from copies of what kernels write.
#include "device/host_memory.hpp"

#include <unistd.h>

#include <fstream>

#include "tests/test.hpp"

using namespace weft;

namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

struct Root {
  std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("weft_host_memory_{}", getpid());
  Root() {
    file(
        "proc/meminfo",
        "MemTotal:       8388608 kB\nMemFree:         100 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0\n");
  }
  ~Root() { std::filesystem::remove_all(path); }
  void file(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name) << text;
  }
  std::int64_t mib() const { return device::available_host_memory(path).bytes / kMiB; }
};

}  // namespace

TEST_CASE("this machine tells its memory") {
  const device::HostMemory here = device::available_host_memory();
  CHECK(here.bytes > 0);
  CHECK(here.limit != "");
  CHECK(device::available_host_memory("/nonexistent").bytes == 0);
}

TEST_CASE("without limits it is MemAvailable") {
  const Root root;
  root.file("proc/self/cgroup", "0::/job\n");
  root.file("sys/fs/cgroup/job/memory.max", "max\n");
  root.file("sys/fs/cgroup/job/memory.current", "1000\n");
  CHECK(root.mib() == 4096);
  CHECK(device::available_host_memory(root.path).limit == "MemAvailable");
}

TEST_CASE("control groups, version 2: the smallest rest of all levels, files not counted") {
  const Root root;
  root.file("proc/self/cgroup", "0::/system/job_7/step_0\n");
  root.file("sys/fs/cgroup/system/job_7/memory.max", fmt::format("{}\n", 1000 * kMiB));
  root.file("sys/fs/cgroup/system/job_7/memory.current", fmt::format("{}\n", 300 * kMiB));
  CHECK(root.mib() == 700);
  root.file("sys/fs/cgroup/system/job_7/memory.stat",
            fmt::format("anon 5\ninactive_file {}\nactive_file {}\n", 150 * kMiB, 50 * kMiB));
  CHECK(root.mib() == 900);
  CHECK(device::available_host_memory(root.path).limit == "memory limit of the control group");
  root.file("sys/fs/cgroup/system/job_7/step_0/memory.max", fmt::format("{}\n", 500 * kMiB));
  root.file("sys/fs/cgroup/system/job_7/step_0/memory.current", "0\n");
  CHECK(root.mib() == 500);
}

TEST_CASE("control groups, version 1, and a container that sees its own group as the root") {
  const Root root;
  root.file("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n");
  root.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.file("sys/fs/cgroup/memory/memory.usage_in_bytes", fmt::format("{}\n", 100 * kMiB));
  CHECK(root.mib() == 4096);
  root.file("sys/fs/cgroup/memory/memory.limit_in_bytes", fmt::format("{}\n", 600 * kMiB));
  CHECK(root.mib() == 500);
  root.file("sys/fs/cgroup/memory/memory.stat", fmt::format("inactive_file 7\ntotal_inactive_file {}\n", 40 * kMiB));
  CHECK(root.mib() == 540);
  // A group that is over its limit leaves next to nothing, not "unknown".
  root.file("sys/fs/cgroup/memory/memory.usage_in_bytes", fmt::format("{}\n", 900 * kMiB));
  CHECK(device::available_host_memory(root.path).bytes == 1);
}

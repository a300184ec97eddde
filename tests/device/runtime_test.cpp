// SPDX-License-Identifier: Apache-2.0
#include "device/runtime.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.hpp"
#include "base/system.hpp"
#include "device/gpu.hpp"
#include "device/host_program.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "tests/test.hpp"

namespace weft::device {
namespace {

Settings with_threads(int threads) {
  Settings settings;
  settings.threads = threads;
  return settings;
}

}  // namespace

TEST_CASE("device.threads beyond what the machine or the library allows is refused") {
  const int hardware = usable_cpus();
  const int most = std::min(hardware, kernels::most_threads());
  CHECK(host_threads(with_threads(1), 4) == 1);
  CHECK(host_threads(with_threads(most), 4) == most);
  // 513 threads hung and 600 crashed in Kokkos' OpenMP space.
  for (const int threads : {most + 1, 513, 600, 4096}) {
    if (threads <= most) continue;
    try {
      host_threads(with_threads(threads), 1);
      FAIL("not refused");
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::usage);
      CHECK(std::string(failure.what()).find(fmt::format("is more than {} (", most)) != std::string::npos);
    }
  }
}

TEST_CASE("threads are as many as CPUs that the process may use, not as the machine has") {
  int threads = 0;
  std::thread([&] {  // its mask is its own
    cpu_set_t mask;
    REQUIRE(sched_getaffinity(0, sizeof mask, &mask) == 0);
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    CPU_ZERO(&mask);
    CPU_SET(first, &mask);
    REQUIRE(sched_setaffinity(0, sizeof mask, &mask) == 0);
    threads = host_threads(with_threads(0), 1);
  })
      .join();
  CHECK(threads == 1);
}

TEST_CASE("by default processes share the hardware threads, and each has one at least") {
  const int all = host_threads(with_threads(0), 1);
  CHECK(all >= 1);
  CHECK(host_threads(with_threads(0), 10000) == 1);
}

TEST_CASE("a GPU that a program was not built for: what was built, what was found, and the command") {
  const GpuBuild hopper{"9.0", 90}, several{"8.0, 9.0, 10.0", 80};
  Gpu gpu{.count = 2, .why_none = {}, .index = 1, .name = "A100", .major = 8, .minor = 0, .has_code = true};
  CHECK(gpu_obstacle(gpu, several, "auto").empty());
  CHECK(gpu_obstacle(gpu, {"8.0", 0}, "auto").empty());
  // Kokkos alone is for a later one: it would end the process.
  const std::string kokkos = gpu_obstacle(gpu, {"8.0", 90}, "auto");
  CHECK(kokkos.find("GPU 1 (A100) has compute capability 8.0, this program was built for 8.0 (Kokkos for 9.0); build "
                    "both for this GPU: WEFT_CUDA_ARCH=80 bash scripts/setup.sh --cuda && cmake --preset cuda-release "
                    "-DWEFT_CUDA_ARCH=80 && ") == 0);
  gpu.has_code = false;
  CHECK(gpu_obstacle(gpu, hopper, "auto").find("this program was built for 9.0 (Kokkos for 9.0); build both") !=
        std::string::npos);
  gpu = {.count = 1, .why_none = {}, .index = 0, .name = "V100", .major = 7, .minor = 0, .has_code = false};
  CHECK(gpu_obstacle(gpu, hopper, "auto").find("GPUs before 7.5 are not supported") != std::string::npos);
  gpu = {.count = 1, .why_none = {}, .index = 0, .name = "RTX", .major = 12, .minor = 0, .has_code = true};
  CHECK(gpu_obstacle(gpu, hopper, "auto").empty());  // from PTX
  Gpu none;
  none.why_none = "no CUDA-capable device is detected";
  const std::string missing = gpu_obstacle(none, hopper, "auto");
  for (const char* part :
       {"device.backend = \"auto\"", "no CUDA-capable device", "9.0 (Kokkos for 9.0)", "cpu-release"})
    CHECK(missing.find(part) != std::string::npos);
}

TEST_CASE("without a usable GPU a CUDA build is replaced by the program without CUDA, if there is one") {
  namespace fs = std::filesystem;
  const fs::path builds = fs::temp_directory_path() / fmt::format("weft_runtime_{}", getpid());
  const std::string problem = "no GPU is visible (no CUDA-capable device is detected)";
  const fs::path program = builds / "cuda-release" / "weft";
  const auto install = [](const fs::path& path, fs::perms permissions) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "#!/bin/sh\n";
    fs::permissions(path, permissions);
  };
  install(program, fs::perms::owner_all);
  CHECK(host_program(problem, program).empty());
  install(builds / "cpu-release" / "weft", fs::perms::owner_all);  // of a neighbouring build folder
  CHECK(host_program(problem, program) == builds / "cpu-release" / "weft");
  install(builds / "cuda-release" / "weft-cpu", fs::perms::owner_read);  // no program
  CHECK(host_program(problem, program) == builds / "cpu-release" / "weft");
  fs::permissions(builds / "cuda-release" / "weft-cpu", fs::perms::owner_all);  // installed: it comes first
  CHECK(host_program(problem, program) == builds / "cuda-release" / "weft-cpu");
  CHECK(host_program("", program).empty());  // a GPU can be used
  fs::remove_all(builds);
}

TEST_CASE("the program that replaces a CUDA build says why, and that \"cuda\" is not available for that reason") {
  if (kernels::kCudaBuild) return;
  CHECK(problem_of_gpus().empty());
  CHECK(replaces_cuda_because().empty());
  CHECK(cuda_unavailable().find("(built without CUDA)") != std::string::npos);
  setenv("WEFT_WITHOUT_GPU", "no GPU is visible", 1);
  CHECK(replaces_cuda_because() == "no GPU is visible");
  CHECK(cuda_unavailable().find("\"cuda\" is not available (no GPU is visible)") != std::string::npos);
  unsetenv("WEFT_WITHOUT_GPU");
}

}  // namespace weft::device

// SPDX-License-Identifier: Apache-2.0
//
// Times diversity and advantages of sets of answers (kernels/language/diversity, one launch for all prompts) against
// the baseline that computes the diversity alone, a kernel per operation (kernels/language/benchmark). Microseconds,
// the median of repeats of 100 calls each; both on embeddings that are in the second-level cache.
//
//   diversity_benchmark [--repeat 31]
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "kernels/language/benchmark/unfused_diversity.hpp"
#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/runtime.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

constexpr int kCalls = 100;

double median_us(int repeat, const std::function<void()>& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  for (int i = 0; i < kCalls; ++i) body();
  check_cuda(cudaDeviceSynchronize(), "warm-up");
  std::vector<float> time(static_cast<std::size_t>(repeat));
  for (float& t : time) {
    check_cuda(cudaEventRecord(begin), "event");
    for (int i = 0; i < kCalls; ++i) body();
    check_cuda(cudaEventRecord(end), "event");
    check_cuda(cudaEventSynchronize(end), "event");
    check_cuda(cudaEventElapsedTime(&t, begin, end), "event");
  }
  check_cuda(cudaEventDestroy(begin), "event");
  check_cuda(cudaEventDestroy(end), "event");
  std::sort(time.begin(), time.end());
  return static_cast<double>(time[time.size() / 2]) / kCalls * 1e3;
}

void run(int repeat, std::int64_t prompts, std::int64_t samples, std::int64_t columns) {
  const std::int64_t rows = prompts * samples;
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i)));
  const DeviceArray<float> embeddings(values), unfused(prompts),
      unfused_workspace(unfused_diversity_workspace(prompts, samples, columns));
  const DeviceArray<double> rewards(std::vector<double>(static_cast<std::size_t>(rows), 1)),
      workspace(set_advantages_workspace(prompts, samples)), diversity(prompts), objective(prompts), distances(rows),
      advantages(rows);
  const DeviceArray<std::int64_t> counts(prompts);
  const AnswerSets sets{
      prompts, samples, {embeddings.data(), Scalar::fp32, rows, columns, columns}, {rewards.data(), rows}};
  const SetAdvantages out{counts.array(), diversity.array(), objective.array(), distances.array(), advantages.array()};
  const auto fused = [&](Backend backend) {
    return median_us(repeat, [&] {
      set_advantages({backend, nullptr}, {.set_size = 2}, sets, workspace.array(), out);
    });
  };
  const double own = fused(Backend::cuda), portable = fused(Backend::portable),
               baseline = median_us(repeat, [&] {
                 unfused_diversity({Backend::cuda, nullptr}, prompts, {embeddings.data(), rows, columns, columns},
                                   unfused_workspace.array(), unfused.array());
               });
  std::printf("%3lld prompts x %3lld answers x %4lld: fused %8.2f us, portable %8.2f us, unfused %8.2f us, %6.2f x\n",
              static_cast<long long>(prompts), static_cast<long long>(samples), static_cast<long long>(columns), own,
              portable, baseline, baseline / own);
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  int repeat = 31;
  if (argc == 3 && std::string(argv[1]) == "--repeat") {
    repeat = std::stoi(argv[2]);
  } else if (argc != 1) {
    std::fprintf(stderr, "diversity_benchmark [--repeat N]\n");
    return 2;
  }
  weft::kernels::start(1, 0);
  for (const auto& [prompts, samples, columns] :
       {std::array<std::int64_t, 3>{1, 10, 384}, {1, 8, 768}, {4, 8, 768}, {32, 8, 768}, {4, 64, 768}, {1, 1024, 384}})
    weft::testing::run(repeat, prompts, samples, columns);
  weft::kernels::stop();
  return 0;
}

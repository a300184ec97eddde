// SPDX-License-Identifier: Apache-2.0
//
// Times diversity and advantages of sets of answers (kernels/language/diversity, one launch for all prompts) against
// the baseline that computes the diversity alone, a kernel per operation (kernels/language/benchmark). Microseconds
// per call, the median of repeats of 100 calls each (5 of the largest), which the host launches one after the other or
// a graph replays; on embeddings that are in the second-level cache.
//
//   diversity_benchmark [--repeat 31]
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/language/diversity/unfused_diversity.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

double median_us(int repeat, int count, cudaStream_t stream, const std::function<void()>& calls) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  calls();
  check_cuda(cudaDeviceSynchronize(), "warm-up");
  std::vector<float> time(static_cast<std::size_t>(repeat));
  for (float& t : time) {
    check_cuda(cudaEventRecord(begin, stream), "event");
    calls();
    check_cuda(cudaEventRecord(end, stream), "event");
    check_cuda(cudaEventSynchronize(end), "event");
    check_cuda(cudaEventElapsedTime(&t, begin, end), "event");
  }
  check_cuda(cudaEventDestroy(begin), "event");
  check_cuda(cudaEventDestroy(end), "event");
  std::sort(time.begin(), time.end());
  return static_cast<double>(time[time.size() / 2]) / count * 1e3;
}

struct Times {
  double launched = 0, replayed = 0;
};

/// Of `count` calls on `stream`, one after the other.
Times measure(int repeat, int count, cudaStream_t stream, const std::function<void()>& call) {
  const auto calls = [&] {
    for (int i = 0; i < count; ++i) call();
  };
  Times times;
  times.launched = median_us(repeat, count, stream, calls);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t recorded = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording");
  calls();
  check_cuda(cudaStreamEndCapture(stream, &graph), "recording");
  check_cuda(cudaGraphInstantiate(&recorded, graph, 0), "recording");
  times.replayed = median_us(repeat, count, stream, [&] { check_cuda(cudaGraphLaunch(recorded, stream), "replay"); });
  check_cuda(cudaGraphExecDestroy(recorded), "graph");
  check_cuda(cudaGraphDestroy(graph), "graph");
  return times;
}

void run(int repeat, cudaStream_t stream, std::int64_t prompts, std::int64_t samples, std::int64_t columns) {
  const std::int64_t rows = prompts * samples;
  const int count = samples < 1000 ? 100 : 5;
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
    return measure(repeat, count, stream, [&] {
      set_advantages({backend, stream}, {.set_size = 2}, sets, workspace.array(), out);
    });
  };
  const Times own = fused(Backend::cuda), portable = fused(Backend::portable),
              baseline = measure(repeat, count, stream, [&] {
                unfused_diversity({Backend::cuda, stream}, prompts, {embeddings.data(), rows, columns, columns},
                                  unfused_workspace.array(), unfused.array());
              });
  const double difference = std::abs(diversity.download()[0] - static_cast<double>(unfused.download()[0]));
  for (const auto& [how, time] : {std::pair{"launched", &Times::launched}, {"in a graph", &Times::replayed}})
    std::printf(
        "%3lld prompts x %4lld answers x %4lld, %10s: fused %8.2f us, portable %9.2f us, unfused %8.2f us, "
        "%6.2f x (diversity %.1e apart)\n",
        static_cast<long long>(prompts), static_cast<long long>(samples), static_cast<long long>(columns), how,
        own.*time, portable.*time, baseline.*time, baseline.*time / own.*time, difference);
  std::fflush(stdout);
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
  cudaStream_t stream = nullptr;
  weft::testing::check_cuda(cudaStreamCreate(&stream), "stream");
  for (const auto& [prompts, samples, columns] :
       {std::array<std::int64_t, 3>{1, 10, 384}, {1, 8, 768}, {4, 8, 768}, {32, 8, 768}, {4, 64, 768}, {1, 1024, 384}})
    weft::testing::run(repeat, stream, prompts, samples, columns);
  weft::kernels::stop();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// Times the encode phase on one GPU: 12 products of GPT-2 small's size, the filter, the exact selection and the rows,
// from one CUDA graph, over several batches. Prints a table and checks that rows do not depend on the filter.
//
//   select_benchmark [tokens d_model features layers]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "base/error.hpp"
#include "kernels/bf16.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"

namespace {

using namespace weft::kernels;
using cuda::DeviceSelection;
using cuda::SelectionRequest;
using cuda::TileRange;

void ok(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* device(std::int64_t n) {
  void* at = nullptr;
  ok(cudaMalloc(&at, static_cast<std::size_t>(n) * sizeof(T)));
  return static_cast<T*>(at);
}

std::uint32_t mix(std::uint64_t i) {
  std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<std::uint32_t>(z >> 32);
}

float normal(std::uint64_t i) {
  const std::uint32_t a = mix(2 * i), b = mix(2 * i + 1);
  const float sum = static_cast<float>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) * 0x1p-16f - 2.0f;
  return sum * 1.7320508f;
}

/// A block of random bf16, repeated with another offset each time: 2^20 + 7 distinct values are enough for a benchmark.
bf16* random_matrix(std::int64_t n, float scale, std::uint64_t seed) {
  static const std::vector<float> pool = [] {
    std::vector<float> values((1 << 20) + 7);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = normal(i);
    return values;
  }();
  std::vector<bf16> host(static_cast<std::size_t>(n));
  std::size_t at = mix(seed) % pool.size();
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (++at >= pool.size()) at = mix(seed + i) % 1000;
    host[i] = to_bf16(pool[at] * scale);
  }
  bf16* to = device<bf16>(n);
  ok(cudaMemcpy(to, host.data(), host.size() * sizeof(bf16), cudaMemcpyHostToDevice));
  return to;
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  Graph(cudaStream_t stream, const std::function<void()>& body) {
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    body();
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&ready, graph, 0));
  }
  ~Graph() {
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
  }
};

/// Median milliseconds of `run`; `before` is outside the clock.
double median(cudaStream_t stream, int times, const std::function<void(int)>& before,
              const std::function<void()>& run) {
  cudaEvent_t begin, end;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  std::vector<float> ms;
  for (int i = 0; i < times + 5; ++i) {
    before(i);
    ok(cudaEventRecord(begin, stream));
    run();
    ok(cudaEventRecord(end, stream));
    ok(cudaEventSynchronize(end));
    float each;
    ok(cudaEventElapsedTime(&each, begin, end));
    if (i >= 5) ms.push_back(each);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(ms.begin(), ms.end());
  return static_cast<double>(ms[ms.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) try {
  const auto argument = [&](int i, std::int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  const bool once = argc > 5;  // one run each, for a profiler
  const std::int64_t N = argument(1, 4096), d = argument(2, 768), F = argument(3, 32768), L = argument(4, 12);
  cudaStream_t stream;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Execution execution{Backend::cuda, stream};
  constexpr int kBatches = 4;
  std::vector<bf16*> batch;
  for (int b = 0; b < kBatches; ++b) batch.push_back(random_matrix(N * L * d, 1.0f, 1000u + b));
  bf16* x = device<bf16>(N * L * d);
  ok(cudaMemcpy(x, batch[0], static_cast<std::size_t>(N * L * d) * 2, cudaMemcpyDeviceToDevice));
  std::vector<bf16*> weight;
  std::vector<Array<const float>> bias;
  for (std::int64_t l = 0; l < L; ++l) {
    weight.push_back(random_matrix(F * d, 1.0f / std::sqrt(static_cast<float>(d)), 77u + l));
    std::vector<float> b(static_cast<std::size_t>(F));
    for (std::size_t f = 0; f < b.size(); ++f) b[f] = 0.2f * normal(f + 1000003 * static_cast<std::uint64_t>(l));
    float* at = device<float>(F);
    ok(cudaMemcpy(at, b.data(), b.size() * 4, cudaMemcpyHostToDevice));
    bias.push_back({at, F});
  }
  const Array<std::byte> gemm_workspace{device<std::byte>(64 << 20), 64 << 20};
  const double flop =
      2.0 * static_cast<double>(N) * static_cast<double>(d) * static_cast<double>(F) * static_cast<double>(L);
  const double bytes = 2.0 * static_cast<double>(N) * static_cast<double>(F) * static_cast<double>(L);
  std::printf("%s, cuBLASLt %lld, N=%lld d=%lld F=%lld L=%lld bf16\n", cuda::gpu_name().c_str(),
              static_cast<long long>(cuda::gemm_library_version()), static_cast<long long>(N),
              static_cast<long long>(d), static_cast<long long>(F), static_cast<long long>(L));
  const auto next_batch = [&](int i) {
    ok(cudaMemcpyAsync(x, batch[static_cast<std::size_t>(i % kBatches)], static_cast<std::size_t>(N * L * d) * 2,
                       cudaMemcpyDeviceToDevice, stream));
  };
  const int times = once ? 1 : 40;
  for (const std::int64_t tile : {std::int64_t{0}, std::int64_t{8192}}) {
    if (once && tile != 0) break;
    const std::int64_t columns = tile == 0 ? F : std::min(tile, F);
    if (F % columns != 0) continue;
    const cuda::GemmShape shape{N, columns, d, L * d, d, columns, Scalar::bf16, Scalar::bf16};
    const cuda::Gemm heuristic(shape, gemm_workspace.size);
    bf16* scratch = device<bf16>(N * columns);
    cuda::GemmRecord record = heuristic.record();
    const auto all_products = [&](const cuda::Gemm& gemm) {
      for (std::int64_t l = 0; l < L; ++l)
        for (std::int64_t f = 0; f < F; f += columns)
          gemm.run(execution, x + l * d, weight[static_cast<std::size_t>(l)] + f * d, scratch, gemm_workspace);
    };
    if (!once) {
      const cuda::GemmRecord alone = cuda::Gemm::tune(execution, shape, x, weight[0], scratch, gemm_workspace);
      double best = 0;
      int number = 0;
      // All layers in one graph, as in a step: under sustained load the clock rate differs from that of a short run.
      for (const cuda::GemmRecord& candidate : cuda::Gemm::candidates(shape, gemm_workspace.size)) {
        const cuda::Gemm gemm(shape, gemm_workspace.size, &candidate);
        const Graph graph(stream, [&] { all_products(gemm); });
        const double ms = median(stream, times, next_batch, [&] { ok(cudaGraphLaunch(graph.ready, stream)); });
        std::printf("  candidate %2d: %.3f ms %.0f TFLOP/s for all layers%s\n", number++, ms, flop / ms / 1e9,
                    candidate.algorithm == alone.algorithm ? " (the fastest alone)" : "");
        if (best == 0 || ms < best) {
          best = ms;
          record = candidate;
          record.milliseconds = ms / static_cast<double>(L * (F / columns));
        }
      }
    }
    ok(cudaFree(scratch));
    const cuda::Gemm tuned(shape, gemm_workspace.size, &record);
    std::printf("tile of %lld features: tuned product %.4f ms, %.0f TFLOP/s; algorithm %s the heuristic's\n",
                static_cast<long long>(columns), record.milliseconds,
                flop / static_cast<double>(L) * static_cast<double>(columns) / static_cast<double>(F) /
                    record.milliseconds / 1e9,
                record.algorithm == heuristic.record().algorithm ? "is" : "is not");
    {
      for (const int k : {16, 32}) {
        for (const int scope : {0, 1, 2}) {  // all_layers, layer, per token
          if (tile != 0 && (scope != 0 || k != 16)) continue;
          const bool all_layers = scope == 0, topk = scope == 2;
          SelectionRequest request;
          request.rule = topk ? SelectionRule::topk : SelectionRule::batch_topk;
          request.all_layers = all_layers;
          request.n_tokens = N;
          request.n_layers = L;
          request.n_features = F;
          request.budget = topk ? k : k * N * (all_layers ? L : 1);
          request.tile_features = tile;
          const std::int64_t workspace_bytes = DeviceSelection::workspace_bytes(request);
          const Array<std::byte> workspace{device<std::byte>(workspace_bytes), workspace_bytes};
          DeviceSelection selection(request, workspace, execution);
          const std::int64_t capacity = k * N * L;
          const SparseActivations rows{N,
                                       L,
                                       F,
                                       {device<std::int64_t>(N + 1), N + 1},
                                       {device<std::uint32_t>(capacity), capacity},
                                       {device<float>(capacity), capacity}};
          const auto produce_with = [&](const cuda::Gemm& gemm) {
            return [&](const Execution& where, const TileRange& range, AnyMatrix product) {
              gemm.run(where, x + range.layer * d,
                       weight[static_cast<std::size_t>(range.layer)] + range.feature_begin * d, product.data,
                       gemm_workspace);
            };
          };
          const auto produce = produce_with(tuned);
          const auto nothing = [](const Execution&, const TileRange&, AnyMatrix) {};
          const auto select = [&](const DeviceSelection::Producer& producer) {
            selection.select(execution, N, request.budget, bias, producer, rows);
          };
          // Eagerly first, until the threshold of the filter has settled. The result must not change.
          const auto read = [&] {
            std::vector<std::uint32_t> all(static_cast<std::size_t>(2 * capacity + 2 * (N + 1)));
            ok(cudaStreamSynchronize(stream));
            ok(cudaMemcpy(all.data(), rows.key.data, static_cast<std::size_t>(capacity) * 4, cudaMemcpyDeviceToHost));
            ok(cudaMemcpy(all.data() + capacity, rows.value.data, static_cast<std::size_t>(capacity) * 4,
                          cudaMemcpyDeviceToHost));
            ok(cudaMemcpy(all.data() + 2 * capacity, rows.row_offsets.data, static_cast<std::size_t>(N + 1) * 8,
                          cudaMemcpyDeviceToHost));
            return all;
          };
          next_batch(0);
          select(produce);
          const auto cold_rows = read();
          const auto cold_passes = selection.report(execution).passes;
          for (int i = 1; i < (once ? 3 : 5); ++i) {
            next_batch(i);
            select(produce);
          }
          if (once) continue;
          next_batch(0);
          select(produce);
          const bool same = read() == cold_rows;
          const Graph whole(stream, [&] { select(produce); });
          const Graph products(stream, [&] {
            for (std::int64_t l = 0; l < L; ++l)
              for (std::int64_t f = 0; f < F; f += columns)
                produce(execution, {l, 0, N, f, columns},
                        {workspace.data + workspace.size - N * columns * 2, Scalar::bf16, N, columns, columns});
          });
          int redos = 0;
          const double whole_ms = median(
              stream, times,
              [&](int i) {
                if (i > 0 && !topk) redos += selection.report(execution).passes > 1;
                next_batch(i);
              },
              [&] { ok(cudaGraphLaunch(whole.ready, stream)); });
          const auto report = selection.report(execution);
          std::int64_t candidates = 0;
          for (const std::int64_t each : report.candidates) candidates += each;
          const double products_ms =
              median(stream, times, next_batch, [&] { ok(cudaGraphLaunch(products.ready, stream)); });
          // Without products: every layer reads the last tile again, so the lists have the right length only on
          // average.
          const Graph reading(stream, [&] { select(nothing); });
          const double reading_ms = median(
              stream, times, [](int) {}, [&] { ok(cudaGraphLaunch(reading.ready, stream)); });
          std::printf(
              "%-10s k=%d tile %5lld whole %.3f ms | products alone %.3f ms %.0f TFLOP/s | filter and select "
              "alone "
              "%.3f ms (%.0f GB/s) | candidates/budget %.3f, cold passes %lld, repeated %d of %d | rows %s | memory "
              "%.0f "
              "MB\n",
              topk         ? "topk"
              : all_layers ? "all_layers"
                           : "layer",
              k, static_cast<long long>(columns), whole_ms, products_ms, flop / products_ms / 1e9, reading_ms,
              bytes / reading_ms / 1e6, static_cast<double>(candidates) / static_cast<double>(k * N * L),
              static_cast<long long>(cold_passes), redos, times, same ? "same" : "DIFFER",
              static_cast<double>(workspace_bytes) / 1e6);
          std::fflush(stdout);
          for (void* at : {static_cast<void*>(workspace.data), static_cast<void*>(rows.row_offsets.data),
                           static_cast<void*>(rows.key.data), static_cast<void*>(rows.value.data)})
            ok(cudaFree(at));
        }
      }
    }
  }
  return 0;
} catch (const weft::Error& error) {
  std::printf("%s\n", error.what());
  return 1;
}

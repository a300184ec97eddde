// SPDX-License-Identifier: Apache-2.0
//
// Sums of rows over GPUs (kernels/peers), without MPI: this process has all ranks, each with a stream and a page of its
// own. Ranks share GPUs if there are fewer. Exits with 77 (skipped) without a GPU.
//
// gpu_peers_test                 2, 3 and 4 ranks, and 8 on as many GPUs
// gpu_peers_test --benchmark     microseconds per sum, by size and form; needs two GPUs
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/launch_cuda.cuh"
#include "kernels/peers/peers_cuda.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::kernels::cuda {
namespace {

using testing::check_cuda;
using testing::DeviceArray;

constexpr int kThreads = 256;
/// Inputs of different rounds.
constexpr int kSets = 5;

void ok(cudaError_t status) { check_cuda(status, "CUDA"); }

int n_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// --- Ranks ----------------------------------------------------------------------------------------------------------

enum class Form { at_once, in_parts };
const char* name(Form form) { return form == Form::at_once ? "at once" : "in parts"; }

/// True if rows of that many bytes fit the pages in this form.
bool fits(Form form, std::int64_t bytes, int ranks) {
  return form != Form::at_once || bytes * (ranks - 1) <= kPeerRows;
}

struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  DeviceArray<PeerPage> page;
  DeviceArray<std::byte> inputs, expected, rows;  // inputs, expected: of kSets rounds
  DeviceArray<unsigned long long> wrong;
  DeviceArray<AdamStep> step;
  DeviceArray<StepGuard> guard;
  int* aborted = nullptr;  // host memory
  PeerGroup group{};

  Execution execution() const { return {Backend::cuda, stream}; }
};

class Ranks {
 public:
  /// most_bytes: of the rows of a rank.
  explicit Ranks(int size, std::int64_t most_bytes = kPeerRows) : ranks_(static_cast<std::size_t>(size)) {
    const int gpus = n_gpus();
    for (int device = 0; device < std::min(gpus, size); ++device) {
      ok(cudaSetDevice(device));
      for (int other = 0; other < std::min(gpus, size); ++other) {
        int can = 1;
        if (other != device) ok(cudaDeviceCanAccessPeer(&can, device, other));
        accessible_ = accessible_ && can != 0;
        if (other == device || can == 0) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
        if (status != cudaErrorPeerAccessAlreadyEnabled) ok(status);
        cudaGetLastError();
      }
    }
    for (int r = 0; r < size; ++r) {
      Rank& rank = (*this)[r];
      rank.device = r % gpus;
      use(r);
      ok(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      rank.page = DeviceArray<PeerPage>(1);
      rank.page.poison(0);
      rank.inputs = DeviceArray<std::byte>(kSets * most_bytes);
      rank.expected = DeviceArray<std::byte>(kSets * most_bytes);
      rank.rows = DeviceArray<std::byte>(most_bytes);
      rank.wrong = DeviceArray<unsigned long long>(1);
      rank.wrong.poison(0);
      rank.step = DeviceArray<AdamStep>(1);
      rank.step.poison(0);
      rank.guard = DeviceArray<StepGuard>(std::vector<StepGuard>{{0, kRuns}});
      ok(cudaHostAlloc(reinterpret_cast<void**>(&rank.aborted), sizeof(int), cudaHostAllocPortable));
      *rank.aborted = 0;
    }
    for (int r = 0; r < size; ++r) {
      Rank& rank = (*this)[r];
      for (int other = 0; other < size; ++other) rank.group.page[other] = (*this)[other].page.data();
      rank.group.aborted = rank.aborted;
      rank.group.step = rank.step.data();
      rank.group.guard = rank.guard.data();
      rank.group.rank = r;
      rank.group.size = size;
    }
  }
  Ranks(const Ranks&) = delete;
  ~Ranks() {
    for (int r = 0; r < size(); ++r) {
      use(r);
      cudaStreamDestroy((*this)[r].stream);
      cudaFreeHost((*this)[r].aborted);
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  bool accessible() const { return accessible_; }
  Rank& operator[](int r) { return ranks_[static_cast<std::size_t>(r)]; }
  const Rank& operator[](int r) const { return ranks_[static_cast<std::size_t>(r)]; }
  void use(int r) const { ok(cudaSetDevice((*this)[r].device)); }
  void synchronise() const {
    for (int r = 0; r < size(); ++r) {
      use(r);
      ok(cudaStreamSynchronize((*this)[r].stream));
    }
  }
  void sum(int r, AnyMatrix rows, Form form) const {
    use(r);
    const Rank& rank = (*this)[r];
    sum_rows(rank.execution(), rank.group, rows, form == Form::at_once);
  }

 private:
  std::vector<Rank> ranks_;
  bool accessible_ = true;
};

// --- What is exchanged ----------------------------------------------------------------------------------------------

struct Shape {
  Scalar type;
  std::int64_t rows, columns;
  std::int64_t bytes() const { return rows * columns * bytes_of(type); }
};

/// Values of several magnitudes: another order of the ranks gives other bits.
float value_of(int set, int rank, std::int64_t i) {
  std::uint64_t x =
      (static_cast<std::uint64_t>(i) * 16 + static_cast<std::uint64_t>(rank)) * 8 + static_cast<std::uint64_t>(set) + 1;
  x ^= x >> 31, x *= 0x9e3779b97f4a7c15ull, x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32;
  const float fraction = static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
  return std::ldexp(fraction, static_cast<int>(x % 9) - 4);
}
std::vector<std::byte> stored(Scalar type, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(bytes_of(type)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t narrow = type == Scalar::bf16 ? to_bf16(values[i]).bits : to_half(values[i]).bits;
    if (type == Scalar::fp32)
      std::memcpy(&bytes[4 * i], &values[i], 4);
    else
      std::memcpy(&bytes[2 * i], &narrow, 2);
  }
  return bytes;
}
std::vector<float> loaded(Scalar type, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(bytes_of(type)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t narrow = 0;
    if (type == Scalar::fp32)
      std::memcpy(&values[i], &bytes[4 * i], 4);
    else
      std::memcpy(&narrow, &bytes[2 * i], 2);
    if (type != Scalar::fp32) values[i] = type == Scalar::bf16 ? float(bf16{narrow}) : float(half{narrow});
  }
  return values;
}

/// Inputs of all ranks and their sums, formed on the host in rank order.
void fill(Ranks& ranks, const Shape& shape) {
  const auto elements = static_cast<std::size_t>(shape.rows * shape.columns);
  for (int set = 0; set < kSets; ++set) {
    std::vector<float> sum(elements);
    std::vector<std::vector<std::byte>> of_rank;
    for (int r = 0; r < ranks.size(); ++r) {
      std::vector<float> values(elements);
      for (std::size_t i = 0; i < elements; ++i) values[i] = value_of(set, r, static_cast<std::int64_t>(i));
      of_rank.push_back(stored(shape.type, values));
      values = loaded(shape.type, of_rank.back());
      for (std::size_t i = 0; i < elements; ++i) sum[i] = r == 0 ? values[i] : sum[i] + values[i];
    }
    const std::vector<std::byte> expected = stored(shape.type, sum);
    for (int r = 0; r < ranks.size(); ++r) {
      ranks.use(r);
      const auto upload = [&](const DeviceArray<std::byte>& to, const std::vector<std::byte>& from) {
        ok(cudaMemcpy(to.data() + set * shape.bytes(), from.data(), from.size(), cudaMemcpyHostToDevice));
      };
      upload(ranks[r].inputs, of_rank[static_cast<std::size_t>(r)]);
      upload(ranks[r].expected, expected);
    }
  }
}

struct Copy {
  const uint2* from;
  uint2* to;
  std::int64_t words;
};
/// Lets the sum start while it still runs, as products do.
__global__ void copy_early(const __grid_constant__ Copy c) {
  allow_next_kernel();
  await_previous_kernel();
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < c.words;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads)
    c.to[i] = c.from[i];
}
/// Counts the words that differ.
__global__ void compare(const uint2* a, const uint2* b, std::int64_t words, unsigned long long* wrong) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads)
    if (a[i].x != b[i].x || a[i].y != b[i].y) atomicAdd(wrong, 1ull);
}

/// Enqueues one sum of `rows` rows of the shape on one rank, and its comparison.
void enqueue(const Ranks& ranks, int r, const Shape& shape, std::int64_t rows, int set, Form form) {
  ranks.use(r);
  const Rank& rank = ranks[r];
  const std::int64_t begin = set * shape.bytes(), words = rows * shape.columns * bytes_of(shape.type) / 8;
  launch_early<Copy>(
      rank.execution(), "copy", copy_early, dim3(64), kThreads, 0, 1,
      {reinterpret_cast<const uint2*>(rank.inputs.data() + begin), reinterpret_cast<uint2*>(rank.rows.data()), words});
  ranks.sum(r, {rank.rows.data(), shape.type, rows, shape.columns, shape.columns}, form);
  compare<<<64, kThreads, 0, rank.stream>>>(reinterpret_cast<const uint2*>(rank.rows.data()),
                                            reinterpret_cast<const uint2*>(rank.expected.data() + begin), words,
                                            rank.wrong.data());
  require_launch("compare");
}

unsigned long long wrong_words(Ranks& ranks) {
  unsigned long long wrong = 0;
  for (int r = 0; r < ranks.size(); ++r) {
    ranks.use(r);
    wrong += ranks[r].wrong.download()[0];
  }
  return wrong;
}

std::vector<int> sizes_of_groups() {
  std::vector<int> sizes{2, 3, 4};
  if (n_gpus() >= 8) sizes.push_back(8);
  return sizes;
}

const std::vector<Scalar> kTypes{Scalar::fp32, Scalar::bf16, Scalar::fp16};

}  // namespace

TEST_CASE("sums of 1 to 64 rows have the bits of sums in rank order, in 10,000 rounds of changing sizes and forms") {
  for (const int size : sizes_of_groups()) {
    Ranks ranks(size, 2 * kPeerRows);
    if (!ranks.accessible()) {
      MESSAGE("skipped 1: these GPUs cannot access each other's memory");
      return;
    }
    for (const Scalar type : kTypes) {
      CAPTURE(size);
      CAPTURE(static_cast<int>(type));
      const Shape shape{type, 64, type == Scalar::fp32 ? 2048 : 4096};
      fill(ranks, shape);
      const std::int64_t row_bytes = shape.bytes() / shape.rows;
      std::uint32_t random = 1;
      for (int round = 0; round < 10000; ++round) {
        random = random * 1664525u + 1013904223u;
        const std::int64_t rows = round < 128 ? round / 2 + 1 : 1 + (random >> 16) % 64;
        Form form = static_cast<Form>((random >> 10) % 2);
        if (round % 4 == 0) form = sums_at_once(rows * row_bytes, size) ? Form::at_once : Form::in_parts;
        if (!fits(form, rows * row_bytes, size)) form = Form::in_parts;
        for (int r = 0; r < size; ++r) enqueue(ranks, r, shape, rows, round % kSets, form);
      }
      ranks.synchronise();
      CHECK(wrong_words(ranks) == 0);
    }
  }
}

TEST_CASE("sums of rows in graphs, of sizes that ranks and warps do not divide") {
  for (const int size : sizes_of_groups()) {
    Ranks ranks(size);
    if (!ranks.accessible()) return;
    for (const Scalar type : kTypes) {
      CAPTURE(size);
      CAPTURE(static_cast<int>(type));
      const Shape shape{type, 64, 728 / bytes_of(type) * 4};  // rows of 2,912 bytes
      fill(ranks, shape);
      std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(size));
      for (int r = 0; r < size; ++r) {
        ranks.use(r);
        cudaGraph_t graph = nullptr;
        ok(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
        int set = 0;
        for (const std::int64_t rows : {1, 64, 2, 3, 64, 64, 33, 1, 1, 8, 17})
          for (const Form form : {Form::at_once, Form::in_parts}) {
            const std::int64_t bytes = rows * shape.columns * bytes_of(type);
            enqueue(ranks, r, shape, rows, set++ % kSets, fits(form, bytes, size) ? form : Form::in_parts);
          }
        ok(cudaStreamEndCapture(ranks[r].stream, &graph));
        ok(cudaGraphInstantiate(&graphs[static_cast<std::size_t>(r)], graph, 0));
        ok(cudaGraphDestroy(graph));
      }
      for (int round = 0; round < 500; ++round)
        for (int r = 0; r < size; ++r) {
          ranks.use(r);
          ok(cudaGraphLaunch(graphs[static_cast<std::size_t>(r)], ranks[r].stream));
        }
      ranks.synchronise();
      CHECK(wrong_words(ranks) == 0);
      for (cudaGraphExec_t graph : graphs) ok(cudaGraphExecDestroy(graph));
    }
  }
}

/// Of the rank that did not come, and of one that was aborted: their peers never take incomplete sums.
TEST_CASE("an aborted sum of rows withholds the step, and its rank sends no more") {
  for (const Form form : {Form::at_once, Form::in_parts}) {
    CAPTURE(name(form));
    Ranks ranks(2);
    if (!ranks.accessible()) return;
    const Shape shape{Scalar::bf16, 8, 4096};
    fill(ranks, shape);
    const AnyMatrix rows[2] = {{ranks[0].rows.data(), shape.type, shape.rows, shape.columns, shape.columns},
                               {ranks[1].rows.data(), shape.type, shape.rows, shape.columns, shape.columns}};
    const auto withheld = [&](int r) {
      ranks.use(r);
      ok(cudaStreamSynchronize(ranks[r].stream));
      CHECK((ranks[r].step.download()[0].withheld != 0) == (ranks[r].guard.download()[0].halted == kExchangeAborted));
      return ranks[r].step.download()[0].withheld != 0;
    };
    // Undisturbed.
    for (int r = 0; r < 2; ++r) enqueue(ranks, r, shape, shape.rows, 0, form);
    ranks.synchronise();
    CHECK(wrong_words(ranks) == 0);
    CHECK(!withheld(0));
    CHECK(!withheld(1));
    // Rank 1 does not come.
    ranks.sum(0, rows[0], form);
    *ranks[0].aborted = 1;
    CHECK(withheld(0));
    // It comes later: at once, rank 0 has sent its rows; in parts, it has not formed its sums.
    ranks.sum(1, rows[1], form);
    if (form == Form::in_parts) *ranks[1].aborted = 1;
    CHECK(withheld(1) == (form == Form::in_parts));
    // Rank 0 sends nothing for a later step, with constants of its own: rank 1 does not complete it.
    ranks.use(0);
    ranks[0].step.poison(0);
    ranks.sum(0, rows[0], form);
    ranks.sum(1, rows[1], form);
    *ranks[1].aborted = 1;
    CHECK(withheld(0));
    CHECK(withheld(1));
  }
}

namespace {

/// Microseconds per sum in graphs of 64 sums, each with a copy of its rows as a product would write them; median.
double microseconds(Ranks& ranks, const Shape& shape, Form form, bool sums) {
  constexpr int kSums = 64, kTurns = 21;
  std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(ranks.size()));
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> events(graphs.size());
  for (int r = 0; r < ranks.size(); ++r) {
    ranks.use(r);
    const Rank& rank = ranks[r];
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kSums; ++i) {
      launch_early<Copy>(rank.execution(), "copy", copy_early, dim3(128), kThreads, 0, 1,
                         {reinterpret_cast<const uint2*>(rank.inputs.data()),
                          reinterpret_cast<uint2*>(rank.rows.data()), shape.bytes() / 8});
      if (sums) ranks.sum(r, {rank.rows.data(), shape.type, shape.rows, shape.columns, shape.columns}, form);
    }
    ok(cudaStreamEndCapture(rank.stream, &graph));
    ok(cudaGraphInstantiate(&graphs[static_cast<std::size_t>(r)], graph, 0));
    ok(cudaGraphDestroy(graph));
    ok(cudaEventCreate(&events[static_cast<std::size_t>(r)].first));
    ok(cudaEventCreate(&events[static_cast<std::size_t>(r)].second));
  }
  std::vector<double> times;
  for (int turn = 0; turn < kTurns; ++turn) {
    // The first graph aligns the ranks, the second is measured.
    for (int launch = 0; launch < 3; ++launch)
      for (int r = 0; r < ranks.size(); ++r) {
        ranks.use(r);
        const auto at = static_cast<std::size_t>(r);
        if (launch == 1) ok(cudaEventRecord(events[at].first, ranks[r].stream));
        ok(cudaGraphLaunch(graphs[at], ranks[r].stream));
        if (launch == 1) ok(cudaEventRecord(events[at].second, ranks[r].stream));
      }
    ranks.synchronise();
    float longest = 0;
    for (const auto& [begin, end] : events) {
      float milliseconds = 0;
      ok(cudaEventElapsedTime(&milliseconds, begin, end));
      longest = std::max(longest, milliseconds);
    }
    times.push_back(1000.0 * static_cast<double>(longest) / kSums);
  }
  for (cudaGraphExec_t graph : graphs) ok(cudaGraphExecDestroy(graph));
  for (const auto& [begin, end] : events) cudaEventDestroy(begin), cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int benchmark() {
  if (n_gpus() < 2) {
    std::printf("needs two GPUs\n");
    return 77;
  }
  std::printf("microseconds per sum of bf16 rows in a graph, with the kernel before it; copy: that kernel alone\n");
  std::printf("%5s %8s %8s %8s %8s  %s\n", "GPUs", "KiB", "copy", "at once", "in parts", "taken");
  for (const int size : {2, 4, 8}) {
    if (size > n_gpus()) break;
    Ranks ranks(size);
    if (!ranks.accessible()) {
      std::printf("these GPUs cannot access each other's memory\n");
      return 77;
    }
    for (const std::int64_t rows : {1, 2, 4, 8, 12, 16, 24, 32, 48, 64}) {
      const Shape shape{Scalar::bf16, rows, 4096};
      std::printf("%5d %8lld %8.2f", size, static_cast<long long>(shape.bytes() / 1024),
                  microseconds(ranks, shape, Form::in_parts, false));
      for (const Form form : {Form::at_once, Form::in_parts})
        if (fits(form, shape.bytes(), size))
          std::printf(" %8.2f", microseconds(ranks, shape, form, true));
        else
          std::printf(" %8s", "-");
      std::printf("  %s\n", name(sums_at_once(shape.bytes(), size) ? Form::at_once : Form::in_parts));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace weft::kernels::cuda

int main(int argc, char** argv) {
  // A kernel that is loaded when it is first launched waits for those that run, which wait for other ranks.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (weft::kernels::cuda::n_gpus() == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  if (argc > 1 && std::string(argv[1]) == "--benchmark") return weft::kernels::cuda::benchmark();
  return doctest::Context(argc, argv).run();
}

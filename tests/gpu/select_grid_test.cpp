// SPDX-License-Identifier: Apache-2.0
//
// The selection on the ranks of a grid, which are threads on one GPU.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "tests/gpu/select_check.hpp"

namespace weft::testing {
namespace {

/// Ranks as threads, of which one runs at a time; each has its own stream. An exchange is a barrier of the threads,
/// after which each stream waits for the others on the device, so that it can be captured.
class Ranks {
 public:
  explicit Ranks(int n, std::shared_ptr<std::mutex> turn = std::make_shared<std::mutex>())
      : pointer_(static_cast<std::size_t>(n)), arrived_(static_cast<std::size_t>(n)), turn_(std::move(turn)) {
    for (cudaEvent_t& event : arrived_) cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  Ranks(const Ranks&) = delete;
  ~Ranks() {
    for (cudaEvent_t event : arrived_) cudaEventDestroy(event);
  }

  /// n ranks that take turns with these.
  std::unique_ptr<Ranks> group(int n) const { return std::make_unique<Ranks>(n, turn_); }

  /// body(rank) on every rank.
  void run(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(arrived_.size()); ++rank)
      threads.emplace_back([&, rank] {
        const std::lock_guard turn(*turn_);
        body(rank);
      });
    for (std::thread& thread : threads) thread.join();
  }

  /// Called by every rank with its stream and memory; act(memory of all ranks) enqueues its copies from them.
  void exchange(int rank, cudaStream_t stream, const void* own,
                const std::function<void(const std::vector<const void*>&)>& act) {
    pointer_[static_cast<std::size_t>(rank)] = own;
    barrier(rank, stream);
    act(pointer_);
    barrier(rank, stream);  // memory may change after all have read it
  }

 private:
  void barrier(int rank, cudaStream_t stream) {
    cuda_ok(cudaEventRecord(arrived_[static_cast<std::size_t>(rank)], stream));
    wait_for_all();
    for (cudaEvent_t event : arrived_) cuda_ok(cudaStreamWaitEvent(stream, event, 0));
    wait_for_all();  // before an event is recorded again
  }
  void wait_for_all() {
    std::unique_lock turn(*turn_, std::adopt_lock);
    if (++n_waiting_ == arrived_.size()) {
      n_waiting_ = 0;
      ++generation_;
      all_here_.notify_all();
    } else {
      all_here_.wait(turn, [this, now = generation_] { return generation_ != now; });
    }
    turn.release();  // still locked by `run`
  }

  std::vector<const void*> pointer_;
  std::vector<cudaEvent_t> arrived_;
  std::shared_ptr<std::mutex> turn_;  // held by the rank that runs
  std::condition_variable all_here_;
  std::size_t n_waiting_ = 0;
  std::uint64_t generation_ = 0;
};

/// One rank of the test.
struct Rank {
  Rank(const SelectionRequest& request, const Sizes& own, const Csr& result, const cuda::SelectionExchange& exchange)
      : workspace(DeviceSelection::workspace_bytes(request)),
        expected(result),
        output(own, std::max<std::int64_t>(static_cast<std::int64_t>(result.key.size()), 1)),
        features(own.features) {
    workspace.poison();
    selection = std::make_unique<DeviceSelection>(request, workspace.array(), stream.execution(), exchange);
    cuda_ok(cudaStreamSynchronize(stream.stream));
  }
  Stream stream;
  Buffer<std::byte> workspace;
  Csr expected;
  Output output;
  std::int64_t features;
  std::unique_ptr<DeviceSelection> selection;
  std::int64_t first_token = 0, first_feature = 0, n_tokens = 0;
};

/// A sum for one rank: the values of all ranks in page-locked memory, which a graph may use again.
struct Sum {
  explicit Sum(std::int64_t n_ranks, std::int64_t n_values) : n(n_values), ranks(n_ranks) {
    cuda_ok(cudaMallocHost(&values, static_cast<std::size_t>((ranks + 1) * n) * sizeof(std::int64_t)));
  }
  Sum(const Sum&) = delete;
  ~Sum() { cudaFreeHost(values); }
  static void form(void* sum) {
    const auto& self = *static_cast<Sum*>(sum);
    for (std::int64_t i = 0; i < self.n; ++i) {
      std::int64_t total = 0;
      for (std::int64_t r = 0; r < self.ranks; ++r) total += self.values[r * self.n + i];
      self.values[self.ranks * self.n + i] = total;
    }
  }
  std::int64_t* values = nullptr;  // [ranks + 1, n]: the last row is the sum
  std::int64_t n, ranks;
};

/// One request on one input, on a grid of data x feature ranks. operands: of the whole input.
void check_on_grid(const SelectionRequest& whole, const Sizes& sizes, const Input& input, int n_data, int n_feature,
                   const EncoderOperands* operands = nullptr) {
  CAPTURE(input.name);
  CAPTURE(static_cast<int>(whole.rule));
  CAPTURE(whole.all_layers);
  CAPTURE(sizes.tokens);
  CAPTURE(whole.budget);
  CAPTURE(n_data);
  CAPTURE(n_feature);
  const int n_ranks = n_data * n_feature;
  const Csr expected = expected_selection(whole, sizes, input);
  const Products products(input, sizes, whole.product);
  std::vector<float> all_bias;
  for (const auto& bias : input.bias) all_bias.insert(all_bias.end(), bias.begin(), bias.end());
  const Buffer<float> bias_buffer(all_bias);
  const auto part = [](std::int64_t n, std::int64_t parts, std::int64_t i) { return i * n / parts; };

  Ranks world(n_ranks);
  std::vector<std::unique_ptr<Ranks>> axis;  // feature axis of each slice of the batch
  std::vector<std::unique_ptr<Sum>> sums;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < n_ranks; ++r) {
    const std::int64_t d = r / n_feature, f = r % n_feature;
    const std::int64_t token_begin = part(sizes.tokens, n_data, d), token_end = part(sizes.tokens, n_data, d + 1);
    const std::int64_t begin = part(sizes.features, n_feature, f), end = part(sizes.features, n_feature, f + 1);
    SelectionRequest request = whole;
    request.n_tokens = (sizes.tokens + n_data - 1) / n_data;
    request.n_features = end - begin;
    request.position = {n_feature, f, n_data, d, begin, sizes.features};
    Csr own;
    own.offsets.push_back(0);
    for (std::int64_t n = token_begin; n < token_end; ++n) {
      for (auto i = static_cast<std::size_t>(expected.offsets[static_cast<std::size_t>(n)]);
           i < static_cast<std::size_t>(expected.offsets[static_cast<std::size_t>(n + 1)]); ++i) {
        const std::int64_t layer = expected.key[i] / sizes.features, feature = expected.key[i] % sizes.features;
        if (feature < begin || feature >= end) continue;
        own.key.push_back(static_cast<std::uint32_t>(layer * (end - begin) + feature - begin));
        own.value.push_back(expected.value[i]);
      }
      own.offsets.push_back(static_cast<std::int64_t>(own.key.size()));
    }
    if (f == 0) axis.push_back(world.group(n_feature));
    Ranks& shards = *axis.back();
    cuda::SelectionExchange exchange;
    exchange.sum = [&world, &sums, r, n_ranks](const Execution& execution, Array<std::int64_t> values) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      const std::size_t bytes = static_cast<std::size_t>(values.size) * sizeof(std::int64_t);
      sums.push_back(std::make_unique<Sum>(n_ranks, values.size));
      Sum* sum = sums.back().get();
      world.exchange(r, stream, values.data, [&](const std::vector<const void*>& all) {
        for (std::size_t i = 0; i < all.size(); ++i)
          cuda_ok(cudaMemcpyAsync(sum->values + static_cast<std::int64_t>(i) * sum->n, all[i], bytes,
                                  cudaMemcpyDeviceToHost, stream));
      });
      cuda_ok(cudaLaunchHostFunc(stream, Sum::form, sum));
      cuda_ok(cudaMemcpyAsync(values.data, sum->values + sum->ranks * sum->n, bytes, cudaMemcpyHostToDevice, stream));
    };
    exchange.all_gather = [&shards, f](const Execution& execution, void* data, std::span<const std::int64_t> bytes) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      shards.exchange(static_cast<int>(f), stream, data, [&](const std::vector<const void*>& all) {
        std::int64_t begin_of_piece = 0;
        for (std::size_t i = 0; i < all.size(); begin_of_piece += bytes[i++])
          if (static_cast<std::int64_t>(i) != f && bytes[i] > 0)
            cuda_ok(cudaMemcpyAsync(static_cast<std::byte*>(data) + begin_of_piece,
                                    static_cast<const std::byte*>(all[i]) + begin_of_piece,
                                    static_cast<std::size_t>(bytes[i]), cudaMemcpyDeviceToDevice, stream));
      });
    };
    exchange.all_gather_if = [&shards, f](const Execution& execution, const std::uint32_t* needed,
                                          Array<std::uint32_t> data) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      // What is not needed is left out, so that a wrong flag shows; a recorded exchange takes place in any case.
      cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
      std::uint32_t takes_place = 1;
      cuda_ok(cudaStreamIsCapturing(stream, &recording));
      if (recording == cudaStreamCaptureStatusNone) {
        cuda_ok(cudaMemcpyAsync(&takes_place, needed, sizeof takes_place, cudaMemcpyDeviceToHost, stream));
        cuda_ok(cudaStreamSynchronize(stream));
      }
      shards.exchange(static_cast<int>(f), stream, data.data, [&](const std::vector<const void*>& all) {
        const std::int64_t piece = data.size / static_cast<std::int64_t>(all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::int64_t begin = static_cast<std::int64_t>(i) * piece;
          if (static_cast<std::int64_t>(i) != f && piece > 0 && takes_place != 0)
            cuda_ok(cudaMemcpyAsync(data.data + begin, static_cast<const std::uint32_t*>(all[i]) + begin,
                                    static_cast<std::size_t>(piece) * 4, cudaMemcpyDeviceToDevice, stream));
        }
      });
    };
    exchange.all_to_all = [&shards, f](const Execution& execution, const void* send,
                                       std::span<const std::int64_t> send_bytes, void* receive,
                                       std::span<const std::int64_t> receive_bytes) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      shards.exchange(static_cast<int>(f), stream, send, [&](const std::vector<const void*>& all) {
        std::int64_t from = 0, to = 0;  // pieces for rank f begin at the same place on every rank
        for (std::int64_t i = 0; i < f; ++i) from += send_bytes[static_cast<std::size_t>(i)];
        for (std::size_t i = 0; i < all.size(); to += receive_bytes[i++])
          if (receive_bytes[i] > 0)
            cuda_ok(cudaMemcpyAsync(static_cast<std::byte*>(receive) + to, static_cast<const std::byte*>(all[i]) + from,
                                    static_cast<std::size_t>(receive_bytes[i]), cudaMemcpyDeviceToDevice, stream));
      });
    };
    ranks.push_back(
        std::make_unique<Rank>(request, Sizes{token_end - token_begin, sizes.layers, end - begin}, own, exchange));
    ranks.back()->first_token = token_begin;
    ranks.back()->first_feature = begin;
    ranks.back()->n_tokens = token_end - token_begin;
  }

  const auto select = [&](int r) {
    Rank& rank = *ranks[static_cast<std::size_t>(r)];
    std::vector<Array<const float>> bias;
    for (std::int64_t l = 0; l < sizes.layers; ++l)
      bias.push_back({bias_buffer.data() + l * sizes.features + rank.first_feature, rank.features});
    EncoderOperands own;
    std::vector<AnyMatrix> weight;
    if (operands != nullptr) {
      for (const AnyMatrix& all : operands->weight) weight.push_back(all.rows_from(rank.first_feature, rank.features));
      own = {operands->x.rows_from(rank.first_token, rank.n_tokens), weight,
             Factors::parts_of(rank.n_tokens, sizes.layers), operands->arrive_layer};
    }
    rank.selection->select(rank.stream.execution(), rank.n_tokens, whole.budget, bias,
                           products.producer(rank.first_token, rank.first_feature), rank.output.activations, nullptr,
                           {}, operands != nullptr ? &own : nullptr);
  };
  Random random{99};
  // 0: as constructed; 1: of the run before; 2: zero; 3: random, different on each rank; 4: too high on one rank; 5:
  // about right, the same on all ranks; 6: at or just below a K-th value.
  const auto set_thresholds = [&](int run) {
    const auto near = [&] {
      return expected.value.empty() ? 1.0f : expected.value[random.next() % expected.value.size()];
    };
    const Array<std::uint32_t> first = ranks[0]->selection->thresholds();
    std::vector<std::uint32_t> same(static_cast<std::size_t>(first.size));
    for (auto& threshold : same)
      threshold = run == 2   ? 0u
                  : run == 6 ? float_bits(near()) - static_cast<std::uint32_t>(random.next() % 2)
                             : float_bits(near() * (0.2f + random.uniform()));
    for (int r = 0; r < n_ranks; ++r) {
      std::vector<std::uint32_t> state = same;
      if (run == 3)
        for (auto& threshold : state) threshold = static_cast<std::uint32_t>(random.next());
      if (run == 4 && r == n_ranks - 1)
        for (auto& threshold : state) threshold = 0x7f800000u;
      cuda_ok(cudaMemcpy(ranks[static_cast<std::size_t>(r)]->selection->thresholds().data, state.data(),
                         state.size() * 4, cudaMemcpyHostToDevice));
    }
  };
  const auto check_all = [&](int run) {
    CAPTURE(run);
    std::vector<std::uint32_t> next;
    std::int64_t ties_cut = 0;
    for (int r = 0; r < n_ranks; ++r) {
      CAPTURE(r);
      Rank& rank = *ranks[static_cast<std::size_t>(r)];
      check_rows(rank.output, rank.expected);
      const SelectionStatistics report = rank.selection->statistics(rank.stream.execution());
      CHECK(report.passes <= 7);
      if (whole.rule != SelectionRule::batch_topk) continue;
      const Array<std::uint32_t> state = rank.selection->thresholds();
      std::vector<std::uint32_t> own(static_cast<std::size_t>(state.size));
      cuda_ok(cudaMemcpy(own.data(), state.data, own.size() * 4, cudaMemcpyDeviceToHost));
      if (r == 0) next = own, ties_cut = report.ties_cut;
      CHECK(own == next);
      CHECK(report.ties_cut == ties_cut);
    }
  };
  const auto poison = [&] {
    for (const auto& rank : ranks) rank->output.poison();
    cuda_ok(cudaDeviceSynchronize());
  };
  for (int run = 0; run < 7; ++run) {
    if (run > 1) set_thresholds(run);
    poison();
    world.run(select);
    cuda_ok(cudaDeviceSynchronize());
    sums.clear();
    check_all(run);
  }
  if (std::getenv("WEFT_TEST_WITHOUT_GRAPHS") != nullptr) return;
  // All ranks in one graph: one branch each, joined by the exchanges.
  const Stream origin;
  cudaEvent_t event = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  cuda_ok(cudaStreamBeginCapture(origin.stream, cudaStreamCaptureModeRelaxed));
  cuda_ok(cudaEventRecord(event, origin.stream));
  for (const auto& rank : ranks) cuda_ok(cudaStreamWaitEvent(rank->stream.stream, event, 0));
  world.run(select);
  for (const auto& rank : ranks) {
    cuda_ok(cudaEventRecord(event, rank->stream.stream));
    cuda_ok(cudaStreamWaitEvent(origin.stream, event, 0));
  }
  cuda_ok(cudaStreamEndCapture(origin.stream, &graph));
  cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
  for (int run = 1; run < 7; ++run) {
    if (run > 1) set_thresholds(run);
    poison();
    cuda_ok(cudaGraphLaunch(ready, origin.stream));
    cuda_ok(cudaStreamSynchronize(origin.stream));
    check_all(run);
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaEventDestroy(event);
}

/// Inputs whose selected entries are on one rank, and ties across ranks.
Input grid_input(const std::string& name, const Sizes& sizes, Scalar type) {
  Input input = make_input(name == "one rank" || name == "one rank, ties" ? "random" : name, sizes, type, 23);
  if (name == "one rank" || name == "one rank, ties") {
    input.name = name;
    std::size_t i = 0;
    for (std::int64_t l = 0; l < sizes.layers; ++l)
      for (std::int64_t n = 0; n < sizes.tokens; ++n)
        for (std::int64_t f = 0; f < sizes.features; ++f, ++i)
          if (n < sizes.tokens / 5 && f >= sizes.features * 4 / 5) {
            input.product[i] = name == "one rank" ? input.product[i] + 16.0f : 16.0f;
            if (type == Scalar::bf16) input.product[i] = static_cast<float>(to_bf16(input.product[i]));
          }
    if (name == "one rank, ties")
      for (auto& bias : input.bias) std::fill(bias.begin(), bias.end(), 0.0f);
  }
  return input;
}

TEST_CASE("a grid of ranks selects what one rank selects, for any input and thresholds") {
  const Sizes sizes{37, 3, 201};  // nothing divides by 2, 3 or 4
  for (const auto& [data, feature] : {std::pair{1, 2}, {2, 1}, {1, 4}, {4, 1}, {2, 2}, {3, 2}})
    for (const char* name : {"random", "planted ties", "ties at the top", "all equal", "one rank", "one rank, ties",
                             "one token", "one feature", "few positive", "all negative", "extreme"}) {
      const Input input = grid_input(name, sizes, Scalar::fp32);
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const bool all_layers : {true, false}) {
          if (rule == SelectionRule::relu && !all_layers) continue;
          SelectionRequest request = request_of(rule, all_layers, sizes, 16 + 2.0 / 3, Scalar::fp32);
          request.tile_tokens = 11;
          request.tile_features = 64;
          check_on_grid(request, sizes, input, data, feature);
        }
    }
}

TEST_CASE("a grid of ranks that filter products as they are formed") {
  const Sizes sizes{130, 2, 1000};
  for (const char* name : {"random", "ties", "all equal"}) {
    const Factors factors(name, sizes, 256, 7);
    for (const auto& [data, feature] : {std::pair{1, 2}, {3, 1}, {2, 2}})
      for (const bool all_layers : {true, false})
        check_on_grid(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, factors.input,
                      data, feature, &factors.operands);
  }
}

TEST_CASE("a grid of ranks whose lists overflow") {
  // 2 x 2 ranks, each with a million entries and a list of at most 115,000.
  const Sizes sizes{1025, 2, 2049};
  for (const char* name : {"random", "planted ties", "all equal", "one rank, ties"}) {
    const Input input = grid_input(name, sizes, Scalar::bf16);
    for (const bool all_layers : {true, false})
      check_on_grid(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, input, 2, 2);
  }
}

TEST_CASE("a grid of more ranks than features or tokens") {
  for (const Sizes& sizes : {Sizes{1, 2, 50}, {3, 2, 1}, {1, 1, 1}, {40, 2, 3}})
    for (const auto& [data, feature] : {std::pair{1, 4}, {4, 1}, {2, 2}})
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const char* name : {"random", "all equal"})
          check_on_grid(request_of(rule, true, sizes, 1.5, Scalar::fp32), sizes, grid_input(name, sizes, Scalar::fp32),
                        data, feature);
}

}  // namespace
}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// What is specific to the GPU in the selection: results from a CUDA graph with its loop, any workspace contents and
// thresholds, wide rows and lists that overflow. The expected rows are a full sort, bit for bit. The cases that both
// drivers share are in tests/transcoder/selection/.
//
// Needs a GPU; exits with 77 (skipped) without one.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include "tests/gpu/select_check.hpp"

namespace weft::testing {
namespace {

TEST_CASE("small: every rule, scope and input in one pass; run by compute-sanitizer") {
  const Sizes sizes{9, 2, 770};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs) {
      const Input input = make_input(name, sizes, product, 17);
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const bool all_layers : {true, false}) {
          if (rule == SelectionRule::relu && !all_layers) continue;
          SelectionRequest request = request_of(rule, all_layers, sizes, 12.5, product);
          request.tile_tokens = 5;
          request.tile_features = 384;
          check_selection(request, sizes, input);
        }
    }
}

TEST_CASE("batch_topk equals a full sort for any input and any threshold of the filter") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs) {
      const Input input = make_input(name, sizes, product, 7);
      for (const bool all_layers : {true, false}) {
        SelectionRequest request = request_of(SelectionRule::batch_topk, all_layers, sizes, 16, product);
        check_selection(request, sizes, input);
        // In tiles of rows and columns.
        request.tile_tokens = 100;
        request.tile_features = 384;
        check_selection(request, sizes, input);
      }
    }
}

TEST_CASE("batch_topk: sizes that are not round, from one entry to wide rows") {
  // 2, 4 and 8 warps share a wide row.
  for (const Sizes& sizes :
       {Sizes{1, 1, 1}, {1, 3, 770}, {5, 2, 7}, {33, 2, 5003}, {19, 2, 10001}, {17, 2, 20001}, {2, 40, 33}})
    for (const Scalar product : {Scalar::bf16, Scalar::fp32})
      for (const char* name : {"random", "planted ties", "one token"}) {
        const Input input = make_input(name, sizes, product, 11);
        for (const bool all_layers : {true, false})
          check_selection(request_of(SelectionRule::batch_topk, all_layers, sizes, 12.5, product), sizes, input);
      }
}

TEST_CASE("batch_topk: 4097 tokens, and lists that overflow with ties") {
  const Sizes sizes{4097, 2, 770};
  for (const char* name : {"random", "planted ties", "all equal"}) {
    const Input input = make_input(name, sizes, Scalar::bf16, 3);
    for (const bool all_layers : {true, false})
      check_selection(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, input);
  }
}

TEST_CASE("a producer that does not repeat its bits: nothing is written outside the lists, and the fault is reported") {
  // All products equal, and larger ones from some pass on. In the pass that admits counted ties, all of them pass.
  const Sizes sizes{4097, 2, 770};
  const SelectionRequest request = request_of(SelectionRule::batch_topk, false, sizes, 16, Scalar::bf16);
  const Buffer<float> bias_buffer(std::vector<float>(static_cast<std::size_t>(sizes.layers * sizes.features), 0.0f));
  std::vector<Array<const float>> bias;
  for (std::int64_t l = 0; l < sizes.layers; ++l)
    bias.push_back({bias_buffer.data() + l * sizes.features, sizes.features});
  constexpr std::int64_t kMargin = 1 << 20;  // bytes after the workspace
  bool overflowed = false;
  for (std::int64_t change = 1; change < 8; ++change) {
    CAPTURE(change);
    const Stream stream;
    const Execution execution = stream.execution();
    const std::int64_t bytes = DeviceSelection::workspace_bytes(request);
    Buffer<std::byte> workspace(bytes + kMargin);
    workspace.poison();
    DeviceSelection selection(request, workspace.array(), execution);
    Output output(sizes, request.budget * sizes.layers);
    std::int64_t calls = 0;
    const auto produce = [&](const Execution& on, const TileRange& range, AnyMatrix out) {
      const bool changed = calls++ / sizes.layers >= change;  // one tile per layer
      cuda_ok(cudaMemsetAsync(out.data, changed ? 0x40 : 0x3f,
                              static_cast<std::size_t>(range.token_count * out.stride * 2),
                              static_cast<cudaStream_t>(on.stream)));
    };
    const Buffer<std::int32_t> fault(std::vector<std::int32_t>{0});
    selection.select(execution, sizes.tokens, request.budget, bias, produce, output.activations, fault.data());
    const SelectionFailure failure = selection.first_failure(execution);
    CHECK((fault.read(1)[0] != 0) == (failure.kind != SelectionFailure::none));
    if (failure.kind == SelectionFailure::overflow) {
      overflowed = true;
      CHECK(failure.group < sizes.layers);
      CHECK(failure.entries > failure.capacity);
      CHECK(selection.statistics(execution).overflow);
    }
    const std::vector<std::byte> all = workspace.read(bytes + kMargin);
    CHECK(std::all_of(all.begin() + bytes, all.end(), [&](std::byte b) { return b == all.back(); }));
    // A later selection is valid again, and the first failure stays known.
    calls = 0;
    const std::int64_t never = 1000;
    change = change + never;
    selection.select(execution, sizes.tokens, request.budget, bias, produce, output.activations);
    change = change - never;
    CHECK(!selection.statistics(execution).overflow);
    CHECK(selection.first_failure(execution).kind == failure.kind);
  }
  CHECK(overflowed);
}

TEST_CASE("topk keeps the best of each token") {
  // The widest rows have more chunks than a block keeps the largest key of.
  for (const Sizes& sizes : {Sizes{257, 3, 1000}, {1, 1, 1}, {9, 2, 20001}, {3, 2, 40001}})
    for (const Scalar product : {Scalar::bf16, Scalar::fp32})
      for (const std::string& name : kInputs) {
        if (sizes.tokens != 257 && name != "random" && (name != "planted ties" || sizes.tokens == 3)) continue;
        const Input input = make_input(name, sizes, product, 5);
        for (const double k : {1.0, 16.0, 300.0})
          for (const bool all_layers : {true, false}) {
            SelectionRequest request = request_of(SelectionRule::topk, all_layers, sizes, k, product);
            check_selection(request, sizes, input);
            request.tile_tokens = 100;
            check_selection(request, sizes, input);
            request.tile_features = 384;
            check_selection(request, sizes, input);
          }
      }
}

TEST_CASE("topk from the tiles of another selection, which may compute them several times; layers without any entry") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::int64_t tile_features : {0, 384})
      for (const double k : {16.0, 300.0}) {
        CAPTURE(tile_features);
        CAPTURE(k);
        const Input input = make_input("random", sizes, product, 5);
        Input masked = input;  // one layer has no entry, the others have some features
        for (std::int64_t l = 0; l < sizes.layers; ++l)
          for (std::int64_t f = 0; f < sizes.features; ++f)
            if (l == 1 || f % 7 != l) masked.bias[l][f] = -std::numeric_limits<float>::infinity();
        SelectionRequest lead = request_of(SelectionRule::batch_topk, false, sizes, 16, product);
        lead.tile_tokens = 100;
        lead.tile_features = tile_features;
        SelectionRequest request = request_of(SelectionRule::topk, false, sizes, k, product);
        request.tile_tokens = lead.tile_tokens;
        request.tile_features = tile_features;
        request.follows = true;
        const Csr expected = expected_selection(request, sizes, masked),
                  expected_of_lead = expected_selection(lead, sizes, input);
        const Stream stream;
        const Execution execution = stream.execution();
        const Products products(input, sizes, product);
        const auto on_device = [&](const Input& of) {
          std::vector<float> all;
          for (const auto& bias : of.bias) all.insert(all.end(), bias.begin(), bias.end());
          return Buffer<float>(all);
        };
        const Buffer<float> bias_buffer = on_device(input), masked_buffer = on_device(masked);
        std::vector<Array<const float>> bias, masked_bias;
        for (std::int64_t l = 0; l < sizes.layers; ++l) {
          bias.push_back({bias_buffer.data() + l * sizes.features, sizes.features});
          masked_bias.push_back({masked_buffer.data() + l * sizes.features, sizes.features});
        }
        Buffer<std::byte> lead_workspace(DeviceSelection::workspace_bytes(lead)),
            workspace(DeviceSelection::workspace_bytes(request));
        lead_workspace.poison();
        workspace.poison();
        DeviceSelection leader(lead, lead_workspace.array(), execution),
            follower(request, workspace.array(), execution);
        Output lead_output(sizes, static_cast<std::int64_t>(expected_of_lead.key.size())),
            output(sizes, static_cast<std::int64_t>(expected.key.size()));
        const auto produce = products.producer();
        const auto select = [&] {
          follower.begin(execution, sizes.tokens, request.budget, masked_bias);
          leader.select(
              execution, sizes.tokens, lead.budget, bias,
              [&](const Execution& where, const TileRange& range, AnyMatrix out) {
                produce(where, range, out);
                follower.take(where, range, out);
              },
              lead_output.activations);
          follower.finish(execution, output.activations);
        };
        const auto check = [&] {
          cuda_ok(cudaStreamSynchronize(stream.stream));
          check_rows(output, expected);
          check_rows(lead_output, expected_of_lead);
        };
        for (int run = 0; run < 2; ++run) {  // the leader's first run takes several passes
          output.poison();
          select();
          check();
        }
        if (std::getenv("WEFT_TEST_WITHOUT_GRAPHS") != nullptr) continue;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        cuda_ok(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeRelaxed));
        select();
        cuda_ok(cudaStreamEndCapture(stream.stream, &graph));
        cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
        const Array<std::uint32_t> thresholds = leader.thresholds();
        for (int run = 0; run < 2; ++run) {
          if (run == 1)  // nothing passes: the loop computes the tiles again
            cuda_ok(cudaMemset(thresholds.data, 0xff, static_cast<std::size_t>(thresholds.size) * 4));
          output.poison();
          cuda_ok(cudaDeviceSynchronize());
          cuda_ok(cudaGraphLaunch(ready, stream.stream));
          check();
        }
        cudaGraphExecDestroy(ready);
        cudaGraphDestroy(graph);
      }
}

TEST_CASE("topk: more entries per token than a block compares at once") {
  const Sizes sizes{6, 3, 20001};
  const Input input = make_input("random", sizes, Scalar::fp32, 5);
  for (const double k : {700.0, 2600.0})
    for (const bool all_layers : {true, false})
      check_selection(request_of(SelectionRule::topk, all_layers, sizes, k, Scalar::fp32), sizes, input);
  // The longest list that there may be, whose shared memory is not a power of two.
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs)
      check_selection(request_of(SelectionRule::topk, false, sizes, 8192, product), sizes,
                      make_input(name, sizes, product, 7));
}

TEST_CASE("relu keeps everything positive") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs)
      check_selection(request_of(SelectionRule::relu, true, sizes, 0, product), sizes,
                      make_input(name, sizes, product, 13));
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  doctest::Context context(argc, argv);
  return context.run();
}

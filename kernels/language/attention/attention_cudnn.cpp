// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention_cudnn.hpp"

#include <cuda_runtime.h>
#include <dlfcn.h>

// The library is found at run time, and no graph is written as JSON.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "kernels/gemm/gemm_cuda.hpp"

// Read by the headers of the library.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace weft::kernels {
namespace cudnn {
namespace {

namespace fe = cudnn_frontend;

/// Oldest version that is used: 9.6 is the first that clears its own workspace, so that a call submits kernels alone.
constexpr std::int64_t kOldestVersion = 90600;
/// Rows of a block of the library's kernels: it rounds lengths up to this.
constexpr std::int64_t kLibraryBlock = 128;

struct Library {
  std::int64_t version = 0;
  std::string absence;
};

/// Loads libcudnn.so.9 from WEFT_CUDNN (the file or its folder), or else where the loader finds it.
Library load() {
  const char* const place = std::getenv("WEFT_CUDNN");
  std::filesystem::path file = "libcudnn.so.9";
  if (place != nullptr && *place != '\0') {
    std::error_code failed;
    file = std::filesystem::is_directory(place, failed) ? std::filesystem::path(place) / file
                                                        : std::filesystem::path(place);
  }
  void* const loaded = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    const char* const reason = dlerror();
    return {0, reason != nullptr ? reason : "libcudnn.so.9 cannot be loaded"};
  }
  const auto version_of = reinterpret_cast<std::size_t (*)()>(dlsym(loaded, "cudnnGetVersion"));
  const std::int64_t version = version_of == nullptr ? 0 : static_cast<std::int64_t>(version_of());
  if (version < kOldestVersion)
    return {0, file.string() + " is cuDNN " + text_of_version(version) + ", needed is " +
                   text_of_version(kOldestVersion) + " or later"};
  fe::cudnn_dlhandle = loaded;
  // The headers would otherwise look for any version of the CUDA runtime, not only the one that this program uses.
  setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", ("libcudart.so." + std::to_string(CUDART_VERSION / 1000)).c_str(), 0);
  return {version, ""};
}

const Library& library() {
  static const Library one = load();
  return one;
}

/// One handle per process, as for the dense library; it is not destroyed.
cudnnHandle_t handle_of(const Execution& execution) {
  static const cudnnHandle_t handle = [] {
    cudnnHandle_t made = nullptr;
    if (const cudnnStatus_t status = fe::detail::create_handle(&made); status != CUDNN_STATUS_SUCCESS)
      throw Error(ExitCode::internal,
                  "cuDNN: starting the library failed (status " + std::to_string(static_cast<int>(status)) + ")");
    return made;
  }();
  static void* stream = nullptr;
  if (stream != execution.stream) {
    if (fe::detail::set_stream(handle, static_cast<cudaStream_t>(execution.stream)) != CUDNN_STATUS_SUCCESS)
      throw Error(ExitCode::internal, "cuDNN: setting the stream failed");
    stream = execution.stream;
  }
  return handle;
}

/// Identifiers of the tensors of a call in the library.
enum Tensor : std::int64_t { kQueries = 1, kKeys, kValues, kOut, kLogSum, kOutGradient, kDq, kDk, kDv, kTensors };

/// Values that a plan depends on.
struct Call {
  AttentionSizes sizes;
  float scale = 0;
  std::array<std::int64_t, kTensors> strides{};  ///< elements from row to row, by Tensor

  bool operator==(const Call&) const = default;
};

struct Prepared {
  Call call;
  AttentionRecord record;
  std::shared_ptr<fe::graph::Graph> graph;  ///< null: the own kernels run
  std::int64_t workspace = 0;
};
std::deque<Prepared>& prepared() {
  static std::deque<Prepared> all;
  return all;
}

/// Rows of one matrix as [sequences, heads, length, head_size].
std::vector<std::int64_t> extents(const AttentionSizes& sizes, std::int64_t heads) {
  return {sizes.sequences, heads, sizes.length, sizes.head_size};
}
std::vector<std::int64_t> steps(const AttentionSizes& sizes, std::int64_t row) {
  return {sizes.length * row, sizes.head_size, row, 1};
}

/// The causal band: row i reads keys i - window + 1 to i.
template <class Attributes>
Attributes masked(Attributes attributes, const Call& call) {
  attributes.set_attn_scale(call.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  if (call.sizes.window > 0) attributes.set_diagonal_band_left_bound(call.sizes.window);
  return attributes;
}

std::shared_ptr<fe::graph::Graph> describe(const Call& call) {
  const AttentionSizes& sizes = call.sizes;
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(sizes.type == Scalar::bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto heads_of = [&](Tensor which) {
    const bool of_keys = which == kKeys || which == kValues || which == kDk || which == kDv;
    return of_keys ? sizes.kv_heads : sizes.heads;
  };
  const auto shaped = [&](auto& tensor, Tensor which) -> auto& {
    if (which == kLogSum)
      return tensor.set_uid(which)
          .set_dim({sizes.sequences, sizes.heads, sizes.length, 1})
          .set_stride({sizes.heads * sizes.length, sizes.length, 1, 1})
          .set_data_type(fe::DataType_t::FLOAT);
    return tensor.set_uid(which).set_dim(extents(sizes, heads_of(which))).set_stride(steps(sizes, call.strides[which]));
  };
  const auto input = [&](Tensor which) {
    fe::graph::Tensor_attributes tensor;
    return graph->tensor(shaped(tensor, which));
  };
  const auto output = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, Tensor which) {
    shaped(tensor->set_output(true), which);
  };
  const auto queries = input(kQueries), keys = input(kKeys), values = input(kValues);
  if (sizes.pass == AttentionPass::forward) {
    const auto [out, log_sum] =
        graph->sdpa(queries, keys, values, masked(fe::graph::SDPA_attributes().set_generate_stats(true), call));
    output(out, kOut);
    output(log_sum, kLogSum);
  } else {
    const auto out = input(kOut), out_gradient = input(kOutGradient), log_sum = input(kLogSum);
    const auto [dq, dk, dv] =
        graph->sdpa_backward(queries, keys, values, out, out_gradient, log_sum,
                             masked(fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(true), call));
    output(dq, kDq);
    output(dk, kDk);
    output(dv, kDv);
  }
  return graph;
}

/// Builds the plan; empty if it was built, else why the library does not take the call.
std::string build(const Execution& execution, Prepared& one, std::int64_t most_workspace) {
  try {
    auto graph = describe(one.call);
    const cudnnHandle_t handle = handle_of(execution);
    for (const std::function<fe::error_t()>& stage : std::initializer_list<std::function<fe::error_t()>>{
             [&] { return graph->validate(); }, [&] { return graph->build_operation_graph(handle); },
             [&] { return graph->create_execution_plans({fe::HeurMode_t::A}); }, [&] { return graph->check_support(); },
             [&] { return graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE); },
             [&] { return graph->get_workspace_size(one.workspace); }})
      if (fe::error_t status = stage(); status.is_bad()) return status.get_message();
    if (one.workspace > most_workspace)
      return "it needs " + std::to_string(one.workspace) + " bytes of workspace, planned are " +
             std::to_string(most_workspace);
    one.graph = std::move(graph);
    return {};
  } catch (const std::runtime_error& failed) {  // a function that this version of the library lacks
    return failed.what();
  }
}

/// Text for messages: "forward, 64 x 1024 rows, 12 heads of 64".
std::string name_of(const AttentionSizes& sizes) {
  return std::string(sizes.pass == AttentionPass::forward ? "forward" : "backward") + ", " +
         std::to_string(sizes.sequences) + " x " + std::to_string(sizes.length) + " rows, " +
         std::to_string(sizes.heads) + " heads of " + std::to_string(sizes.head_size);
}

/// The plan of a call, built on first use.
const Prepared& plan_of(const Execution& execution, const Attention& shape, const Call& call) {
  std::deque<Prepared>& all = prepared();
  const AttentionPass pass = call.sizes.pass;
  const bool library_wanted = is_planned(pass, shape, call.sizes.type);
  for (const Prepared& one : all)
    if (one.call == call && (one.record.implementation == AttentionImplementation::cudnn) == library_wanted) return one;
  Prepared one;
  one.call = call;
  one.record.sizes = call.sizes;
  one.record.gpu = cuda::gpu_name();
  if (!library_wanted) return all.emplace_back(std::move(one));
  one.record.implementation = AttentionImplementation::cudnn;
  const AttentionRecord* const record = attention_record(call.sizes);
  const bool demanded = shape.implementation == AttentionImplementation::cudnn;
  if (version() == 0)
    throw Error(ExitCode::usage,
                "attention by cuDNN is demanded and there is no cuDNN (" + absence() +
                    "); name the folder of libcudnn.so.9 in WEFT_CUDNN, or take device.attention = \"auto\"");
  one.record.library = version();
  if (record != nullptr) {
    one.record.own_milliseconds = record->own_milliseconds;
    one.record.cudnn_milliseconds = record->cudnn_milliseconds;
  }
  const std::string refusal = !demanded && record->gpu != one.record.gpu
                                  ? "the record is of " + record->gpu + ", this is " + one.record.gpu
                                  : build(execution, one, workspace(pass, shape));
  if (refusal.empty())
    log::info("attention {}: cuDNN {}, {} MiB of workspace", name_of(call.sizes), text_of_version(version()),
              one.workspace >> 20);
  else
    log::warning("attention {}: own kernels instead of cuDNN {} ({})", name_of(call.sizes), text_of_version(version()),
                 refusal);
  return all.emplace_back(std::move(one));
}

/// Runs a pass on its matrices and `log_sum`. False if the own kernels compute it.
bool run(const Execution& execution, AttentionPass pass, const Attention& shape,
         std::initializer_list<std::pair<Tensor, AnyMatrix>> matrices, float* log_sum, Array<std::byte> workspace) {
  const Scalar type = matrices.begin()->second.type;
  if (shape.implementation == AttentionImplementation::own || !takes(shape, type)) return false;
  Call call{.sizes = attention_sizes(pass, shape, type), .scale = shape.scale};
  std::unordered_map<std::int64_t, void*> tensors{{kLogSum, log_sum}};
  for (const auto& [tensor, matrix] : matrices) {
    call.strides[tensor] = matrix.stride;
    tensors.emplace(tensor, matrix.data);
  }
  const Prepared& plan = plan_of(execution, shape, call);
  if (plan.graph == nullptr) return false;
  if (workspace.size < plan.workspace)
    throw Error(ExitCode::internal, "attention by cuDNN: the workspace is too small");
  if (fe::error_t status = plan.graph->execute(handle_of(execution), tensors, workspace.data); status.is_bad())
    throw Error(ExitCode::internal, "attention by cuDNN failed (" + status.get_message() + ")");
  return true;
}

}  // namespace

bool is_planned(AttentionPass pass, const Attention& shape, Scalar type) {
  if (shape.implementation == AttentionImplementation::own || !takes(shape, type)) return false;
  if (shape.implementation == AttentionImplementation::cudnn) return true;
  const AttentionRecord* const record = attention_record(attention_sizes(pass, shape, type));
  return record != nullptr && record->implementation == AttentionImplementation::cudnn && record->library == version();
}

std::int64_t workspace(AttentionPass pass, const Attention& shape) {
  constexpr std::int64_t kSmall = 4096;  // what plans take whatever the size
  if (pass == AttentionPass::forward) return kSmall;
  const std::int64_t length = (shape.length + kLibraryBlock - 1) / kLibraryBlock * kLibraryBlock,
                     heads = shape.sequences * shape.heads;
  const std::int64_t score_gradient = 2 * heads * length * length, out_products = 4 * heads * shape.length;
  // Gradients of keys and values by query head, before those of a group are added.
  const std::int64_t by_query_head = shape.heads == shape.kv_heads ? 0 : 4 * heads * shape.length * shape.head_size;
  return score_gradient + out_products + by_query_head + kSmall;
}

std::int64_t version() { return library().version; }
std::string absence() { return library().absence; }

std::string text_of_version(std::int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

bool attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte> workspace) {
  return run(execution, AttentionPass::forward, shape,
             {{kQueries, queries}, {kKeys, keys}, {kValues, values}, {kOut, out}}, log_sum.data, workspace);
}

bool attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  return run(execution, AttentionPass::backward, shape,
             {{kQueries, queries},
              {kKeys, keys},
              {kValues, values},
              {kOut, out},
              {kOutGradient, out_gradient},
              {kDq, dq},
              {kDk, dk},
              {kDv, dv}},
             const_cast<float*>(log_sum.data), workspace);
}

std::vector<AttentionRecord> records_in_use() {
  std::vector<AttentionRecord> records;
  for (const Prepared& one : prepared()) {
    AttentionRecord record = one.record;
    record.implementation = one.graph == nullptr ? AttentionImplementation::own : AttentionImplementation::cudnn;
    const auto same = [&](const AttentionRecord& each) { return each.sizes == record.sizes; };
    const auto known = std::find_if(records.begin(), records.end(), same);
    if (known == records.end())
      records.push_back(record);
    else
      *known = record;  // of other strides, or demanded later
  }
  return records;
}

}  // namespace cudnn
}  // namespace weft::kernels

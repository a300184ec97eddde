// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention_tuning.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"

namespace weft::kernels {
namespace {

/// Median of some runs of `work`, in milliseconds. Synchronises.
double measure(const Execution& execution, const std::function<void()>& work) {
  constexpr int kWarmUp = 3, kTimed = 15;
  const auto require = [](cudaError_t status) {
    if (status != cudaSuccess)
      throw Error(ExitCode::internal,
                  std::string("CUDA: timing attention failed (") + cudaGetErrorString(status) + ")");
  };
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  cudaEvent_t begin = nullptr, end = nullptr;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  std::array<float, kTimed> times{};
  for (int i = 0; i < kWarmUp; ++i) work();
  for (float& time : times) {
    require(cudaEventRecord(begin, stream));
    work();
    require(cudaEventRecord(end, stream));
    require(cudaEventSynchronize(end));
    require(cudaEventElapsedTime(&time, begin, end));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kTimed / 2, times.end());
  return static_cast<double>(times[kTimed / 2]);
}

Attention shape_of(const AttentionSizes& sizes) {
  Attention shape;
  shape.sequences = sizes.sequences;
  shape.length = sizes.length;
  shape.heads = sizes.heads;
  shape.kv_heads = sizes.kv_heads;
  shape.head_size = sizes.head_size;
  shape.window = sizes.window;
  shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(sizes.head_size)));
  return shape;
}

}  // namespace

std::int64_t tuning_workspace(const Execution& execution, const AttentionSizes& sizes) {
  Attention shape = shape_of(sizes);
  shape.implementation = AttentionImplementation::own;
  return std::max({attention_backward_workspace(execution, shape, sizes.type),
                   cudnn::workspace(AttentionPass::forward, shape), cudnn::workspace(AttentionPass::backward, shape)});
}

AttentionRecord tune_attention(const Execution& execution, const AttentionRecord& given,
                               const AttentionMemory& memory) {
  const AttentionSizes& sizes = given.sizes;
  const std::int64_t queries = sizes.heads * sizes.head_size, keys = sizes.kv_heads * sizes.head_size;
  Attention shape = shape_of(sizes);
  const auto forward = [&] {
    attention(execution, shape, memory.inputs.columns_from(0, queries), memory.inputs.columns_from(queries, keys),
              memory.inputs.columns_from(queries + keys, keys), memory.out, memory.log_sum, memory.workspace);
  };
  const auto backward = [&] {
    attention_backward(execution, shape, memory.inputs.columns_from(0, queries),
                       memory.inputs.columns_from(queries, keys), memory.inputs.columns_from(queries + keys, keys),
                       memory.out, memory.log_sum, memory.out_gradient, memory.gradients.columns_from(0, queries),
                       memory.gradients.columns_from(queries, keys),
                       memory.gradients.columns_from(queries + keys, keys), memory.workspace);
  };
  shape.implementation = AttentionImplementation::own;
  forward();  // the backward pass needs its results
  const std::function<void()> work = sizes.pass == AttentionPass::forward ? std::function<void()>(forward) : backward;
  AttentionRecord record;
  record.sizes = sizes;
  record.gpu = cuda::gpu_name();
  record.own_milliseconds = measure(execution, work);
  record.library = cudnn::version();
  if (record.library == 0) return record;
  shape.implementation = AttentionImplementation::cudnn;
  work();
  const std::vector<AttentionRecord> used = cudnn::records_in_use();
  const auto same = std::find_if(used.begin(), used.end(), [&](const auto& each) { return each.sizes == sizes; });
  if (same == used.end() || same->implementation != AttentionImplementation::cudnn) return record;  // not taken
  record.cudnn_milliseconds = measure(execution, work);
  if (record.cudnn_milliseconds < record.own_milliseconds) record.implementation = AttentionImplementation::cudnn;
  return record;
}

}  // namespace weft::kernels

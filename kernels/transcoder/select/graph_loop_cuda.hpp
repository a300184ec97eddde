// SPDX-License-Identifier: Apache-2.0
//
// A loop in a CUDA graph: a body that is repeated while a kernel sets the loop's condition.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {

class GraphLoop {
 public:
  GraphLoop() {
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "loop of a graph, stream");
    stream_.reset(stream);
  }

  /// Creates a condition for the graph that `stream` captures.
  static cudaGraphConditionalHandle condition(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
    require(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
            "loop of a graph, capture");
#else
    require(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr),
            "loop of a graph, capture");
#endif
    cudaGraphConditionalHandle loop;
    require(cudaGraphConditionalHandleCreate(&loop, graph, 0, cudaGraphCondAssignDefault), "loop of a graph, capture");
    return loop;
  }

  /// Appends to the graph that `stream` captures a loop that runs `body` while the condition `loop` is set.
  template <class Body>
  void capture(cudaStream_t stream, cudaGraphConditionalHandle loop, Body&& body) const {
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
    const cudaGraphNode_t* before = nullptr;
    std::size_t n_before = 0;
    cudaGraphNode_t node = nullptr;
    cudaGraphNodeParams parameters = {};
    parameters.type = cudaGraphNodeTypeConditional;
    parameters.conditional.handle = loop;
    parameters.conditional.type = cudaGraphCondTypeWhile;
    parameters.conditional.size = 1;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData* edges = nullptr;
    require(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &before, &edges, &n_before),
            "loop of a graph, capture");
    require(cudaGraphAddNode(&node, graph, before, edges, n_before, &parameters), "loop of a graph, capture");
#else
    require(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, &before, &n_before),
            "loop of a graph, capture");
    require(cudaGraphAddNode(&node, graph, before, n_before, &parameters), "loop of a graph, capture");
#endif
    cudaGraph_t inside = parameters.conditional.phGraph_out[0];
    require(cudaStreamBeginCaptureToGraph(stream_.get(), inside, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed),
            "loop of a graph, capture");
    body(stream_.get());
    require(cudaStreamEndCapture(stream_.get(), &inside), "loop of a graph, capture");
#if CUDART_VERSION >= 13000
    require(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamSetCaptureDependencies),
            "loop of a graph, capture");
#else
    require(cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamSetCaptureDependencies),
            "loop of a graph, capture");
#endif
  }

 private:
  struct DestroyStream {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  std::unique_ptr<CUstream_st, DestroyStream> stream_;  // captures the body
};

}  // namespace weft::kernels::cuda

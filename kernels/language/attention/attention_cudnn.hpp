// SPDX-License-Identifier: Apache-2.0
//
// Attention by cuDNN. The library is loaded at run time, on first use: a program that was built with its headers
// (WEFT_ENABLE_CUDNN) runs without it.
//
// A call of new sizes and strides builds an execution plan, which takes tens of milliseconds and must not happen while
// a graph is captured; later calls only submit its kernels, also into a CUDA graph. The plan is the first that the
// library proposes and is not timed. The backward pass uses the library's deterministic algorithm. On Hopper that one
// keeps the gradient of the scores, length x length numbers of 16 bits for every head.
//
// The logarithms of sums are those of the own kernels, so that each forward pass fits each backward pass.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/execution.hpp"
#include "kernels/language/attention/attention_records.hpp"
#include "kernels/language/attention/attention_shape.hpp"

namespace weft::kernels {

/// True if this build can use cuDNN.
#ifdef WEFT_ENABLE_CUDNN
constexpr bool kCudnnBuild = true;
#else
constexpr bool kCudnnBuild = false;
#endif

namespace cudnn {

/// Largest head size that the library is given.
inline constexpr std::int64_t kLargestLibraryHead = 128;

/// True if the library has such attention: no cap, no documents, no sparse blocks, no dropout.
inline bool takes(const Attention& shape, Scalar type) {
  return (type == Scalar::bf16 || type == Scalar::fp16) && shape.head_size <= kLargestLibraryHead &&
         shape.softcap == 0 && shape.first_key.size == 0 && shape.kept.size == 0 && shape.dropout.step == nullptr;
}

/// True if a call is planned to run on cuDNN: if it is requested, or recorded for this version of the library. Needs no
/// GPU: an entry of another GPU is detected at the first call, which then runs on the own kernels.
bool is_planned(AttentionPass, const Attention&, Scalar type);

/// Bytes of workspace that a call may take.
std::int64_t workspace(AttentionPass, const Attention&);

/// Version of the loaded library, 91900 for 9.19.0; 0 if there is none that can be used, and why.
std::int64_t version();
std::string absence();
/// Text of a version: "9.19.0".
std::string text_of_version(std::int64_t version);

/// Computes kernels::attention and attention_backward by cuDNN, for matrices of one 16-bit type whose rows are whole
/// 16-byte words. Returns false, with nothing done, if the own kernels are to run. Throws Error(usage) if the shape
/// demands cuDNN and there is none.
bool attention(const Execution&, const Attention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values, AnyMatrix out,
               Array<float> log_sum, Array<std::byte> workspace);
bool attention_backward(const Execution&, const Attention&, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
                        AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient, AnyMatrix dq, AnyMatrix dk,
                        AnyMatrix dv, Array<std::byte> workspace);

std::vector<AttentionRecord> records_in_use();

}  // namespace cudnn
}  // namespace weft::kernels

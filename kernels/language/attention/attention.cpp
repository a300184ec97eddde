// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"

#include <algorithm>
#include <initializer_list>

#include "base/error.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "kernels/slow_paths.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::attention) attention;
decltype(kernels::attention_backward) attention_backward;
}  // namespace portable

namespace cuda {
decltype(kernels::attention) attention;
decltype(kernels::attention_backward) attention_backward;
}  // namespace cuda

namespace {

void check(const Attention& shape) {
  if (shape.head_size < 8 || shape.head_size % 8 != 0 || shape.head_size > kLargestHead)
    throw Error(ExitCode::internal, "attention: the head size is not a multiple of 8 up to 256");
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    throw Error(ExitCode::internal, "attention: the number of heads is not a multiple of that of key heads");
  if (shape.first_key.size != 0 && shape.first_key.size != shape.rows())
    throw Error(ExitCode::internal, "attention: first_key does not have one entry per row");
  if (shape.kept.size != 0 && shape.kept.size != shape.block_pairs())
    throw Error(ExitCode::internal, "attention: kept does not have one flag per pair of blocks of every head");
  if (shape.dropout.step != nullptr && shape.dropout.layer >= kMostDropoutLayers)
    throw Error(ExitCode::internal, "attention: the random numbers of dropout do not distinguish so many layers");
  if (!(shape.scale > 0)) throw Error(ExitCode::internal, "attention: the scale is not positive");
}

/// True if all matrices have 16-bit numbers of one type, in rows of whole 16-byte words.
bool are_in_words(std::initializer_list<AnyMatrix> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const AnyMatrix& matrix) {
    return matrix.type == matrices.begin()->type && bytes_of(matrix.type) == 2 && matrix.stride % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0;
  });
}

/// Execution of a call: tensor cores take bf16 and fp16 in rows of whole 16-byte words, and three head sizes, without
/// dropout.
Execution place_of(const Execution& execution, const Attention& shape, std::initializer_list<AnyMatrix> matrices) {
  const bool taken = slow_attention(shape.head_size, matrices.begin()->type, shape.dropout.step != nullptr).empty() &&
                     are_in_words(matrices);
  return taken ? execution : Execution{Backend::portable, execution.stream};
}

/// Bytes that cuDNN may take for a call that is planned to run on cuDNN, else 0.
std::int64_t library_workspace(AttentionPass pass, const Execution& execution, const Attention& shape, Scalar type) {
  if constexpr (kCudnnBuild)
    if (execution.backend == Backend::cuda && cudnn::is_planned(pass, shape, type))
      return cudnn::workspace(pass, shape);
  static_cast<void>(pass), static_cast<void>(execution), static_cast<void>(shape), static_cast<void>(type);
  return 0;
}

}  // namespace

std::int64_t attention_workspace(const Execution& execution, const Attention& shape, Scalar type) {
  return library_workspace(AttentionPass::forward, execution, shape, type);
}

std::int64_t attention_backward_workspace(const Execution& execution, const Attention& shape, Scalar type) {
  // out . out_gradient of each row and head.
  const std::int64_t products = shape.rows() * shape.heads * static_cast<std::int64_t>(sizeof(float));
  return std::max(products, library_workspace(AttentionPass::backward, execution, shape, type));
}

void attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte> workspace) {
  check(shape);
  if constexpr (kCudnnBuild)
    if (execution.backend == Backend::cuda && are_in_words({queries, keys, values, out}) &&
        cudnn::attention(execution, shape, queries, keys, values, out, log_sum, workspace))
      return;
  const Execution place = place_of(execution, shape, {queries, keys, values, out});
  dispatch<portable::attention, cuda::attention>(place, shape, queries, keys, values, out, log_sum, workspace);
}

void attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  check(shape);
  if (workspace.size < attention_backward_workspace(execution, shape, queries.type))
    throw Error(ExitCode::internal, "attention_backward: the workspace is too small");
  if constexpr (kCudnnBuild)
    if (execution.backend == Backend::cuda && are_in_words({queries, keys, values, out, out_gradient, dq, dk, dv}) &&
        cudnn::attention_backward(execution, shape, queries, keys, values, out, log_sum, out_gradient, dq, dk, dv,
                                  workspace))
      return;
  const Execution place = place_of(execution, shape, {queries, keys, values, out, out_gradient, dq, dk, dv});
  dispatch<portable::attention_backward, cuda::attention_backward>(place, shape, queries, keys, values, out, log_sum,
                                                                   out_gradient, dq, dk, dv, workspace);
}

AttentionImplementation planned_attention(AttentionPass pass, const Attention& shape, Scalar type) {
  if constexpr (kCudnnBuild)
    if (cudnn::is_planned(pass, shape, type)) return AttentionImplementation::cudnn;
  static_cast<void>(pass), static_cast<void>(shape), static_cast<void>(type);
  return AttentionImplementation::own;
}

std::vector<AttentionRecord> attention_records_in_use() {
  if constexpr (kCudnnBuild)
    return cudnn::records_in_use();
  else
    return {};
}

}  // namespace weft::kernels

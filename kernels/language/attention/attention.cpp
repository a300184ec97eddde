// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"

#include <initializer_list>

#include "base/error.hpp"
#include "kernels/dispatch.hpp"

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

/// Where the call runs: tensor cores take bf16 and fp16 in rows of whole 16-byte words, and three head sizes, without
/// dropout.
Execution place_of(const Execution& execution, const Attention& shape, std::initializer_list<AnyMatrix> matrices) {
  bool taken =
      (shape.head_size == 32 || shape.head_size == 64 || shape.head_size == 128) && shape.dropout.step == nullptr;
  for (const AnyMatrix& matrix : matrices)
    taken = taken && matrix.type != Scalar::fp32 && matrix.stride % 8 == 0 &&
            reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0;
  return taken ? execution : Execution{Backend::portable, execution.stream};
}

}  // namespace

std::int64_t attention_workspace(const Execution&, const Attention&, Scalar) { return 0; }

std::int64_t attention_backward_workspace(const Execution&, const Attention& shape, Scalar) {
  // out . out_gradient of each row and head.
  return shape.rows() * shape.heads * static_cast<std::int64_t>(sizeof(float));
}

void attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte> workspace) {
  check(shape);
  const Execution place = place_of(execution, shape, {queries, keys, values, out});
  dispatch<portable::attention, cuda::attention>(place, shape, queries, keys, values, out, log_sum, workspace);
}

void attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  check(shape);
  if (workspace.size < attention_backward_workspace(execution, shape, queries.type))
    throw Error(ExitCode::internal, "attention_backward: the workspace is too small");
  const Execution place = place_of(execution, shape, {queries, keys, values, out, out_gradient, dq, dk, dv});
  dispatch<portable::attention_backward, cuda::attention_backward>(place, shape, queries, keys, values, out, log_sum,
                                                                   out_gradient, dq, dk, dv, workspace);
}

}  // namespace weft::kernels

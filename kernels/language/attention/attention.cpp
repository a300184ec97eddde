// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::attention_workspace) attention_workspace;
decltype(kernels::attention_backward_workspace) attention_backward_workspace;
decltype(kernels::attention) attention;
decltype(kernels::attention_backward) attention_backward;
}  // namespace portable

namespace {

void check(const Attention& shape) {
  if (shape.head_size % 8 != 0 || shape.head_size > kLargestHead || shape.head_size < 8)
    throw Error(ExitCode::internal, "attention: head size is not a multiple of 8 up to 256");
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    throw Error(ExitCode::internal, "attention: heads do not share the key heads evenly");
}

}  // namespace

std::int64_t attention_workspace(const Execution& execution, const Attention& shape, Scalar type) {
  return portable::attention_workspace(execution, shape, type);
}

std::int64_t attention_backward_workspace(const Execution& execution, const Attention& shape, Scalar type) {
  return portable::attention_backward_workspace(execution, shape, type);
}

void attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte> workspace) {
  check(shape);
  portable::attention(execution, shape, queries, keys, values, out, log_sum, workspace);
}

void attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  check(shape);
  portable::attention_backward(execution, shape, queries, keys, values, out, log_sum, out_gradient, dq, dk, dv,
                               workspace);
}

}  // namespace weft::kernels

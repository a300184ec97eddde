// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/matrix_attention.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/attention/score_matrix.hpp"

namespace weft::bench {
namespace {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Attention;
using kernels::Execution;
using kernels::Form;
using kernels::Scalar;

constexpr std::int64_t kAlignment = 256;  // alignment of the workspace of products

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Bytes of one matrix of scores, a multiple of the alignment of products. A size beyond 64 bits is returned as kMost,
/// which fits no memory.
std::int64_t score_bytes(const Attention& shape, Scalar type) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  const double exact = static_cast<double>(shape.sequences * shape.heads) * static_cast<double>(shape.length) *
                       static_cast<double>(shape.length) * static_cast<double>(kernels::bytes_of(type));
  if (exact > static_cast<double>(kMost)) return kMost;
  return aligned(shape.rows() * shape.heads * shape.length * kernels::bytes_of(type));
}

/// Bytes of the logarithms of sums that the backward pass recomputes.
std::int64_t log_sum_bytes(const Attention& shape) { return aligned(4 * shape.rows() * shape.heads); }

std::int64_t product_bytes(const Attention& shape, Scalar type) {
  return std::max(kernels::gemm_workspace(type, type, type, shape.length, shape.length, shape.head_size),
                  kernels::gemm_workspace(type, type, type, shape.length, shape.head_size, shape.length));
}

std::int64_t forward_bytes(const Execution&, const Attention& shape, Scalar type) {
  return score_bytes(shape, type) + product_bytes(shape, type);
}
std::int64_t backward_bytes(const Execution&, const Attention& shape, Scalar type) {
  return 2 * score_bytes(shape, type) + log_sum_bytes(shape) + product_bytes(shape, type);
}

/// Hands out the workspace piece by piece.
class Workspace {
 public:
  Workspace(const Attention& shape, Scalar type, Array<std::byte> memory, std::int64_t needed)
      : shape_(shape), type_(type), memory_(memory) {
    if (memory.size < needed)
      throw error(ExitCode::internal, "attention with a matrix of scores: the workspace is too small");
  }
  AnyMatrix scores() {
    const std::int64_t rows = shape_.rows() * shape_.heads;
    return {take(score_bytes(shape_, type_)), type_, rows, shape_.length, shape_.length};
  }
  Array<float> log_sums() {
    return {reinterpret_cast<float*>(take(log_sum_bytes(shape_))), shape_.rows() * shape_.heads};
  }
  Array<std::byte> rest() const { return {memory_.data + used_, memory_.size - used_}; }

 private:
  std::byte* take(std::int64_t bytes) { return memory_.data + std::exchange(used_, used_ + bytes); }

  const Attention& shape_;
  const Scalar type_;
  const Array<std::byte> memory_;
  std::int64_t used_ = 0;
};

/// each(sequence, query head): the products of a layer.
template <class Each>
void for_heads(const Attention& shape, const Each& each) {
  for (std::int64_t sequence = 0; sequence < shape.sequences; ++sequence)
    for (std::int64_t head = 0; head < shape.heads; ++head) each(sequence, head);
}

/// Views of one sequence and head.
struct Views {
  const Attention& shape;

  AnyMatrix scores(const AnyMatrix& all, std::int64_t sequence, std::int64_t head) const {
    return all.rows_from((sequence * shape.heads + head) * shape.length, shape.length);
  }
  AnyMatrix query(const AnyMatrix& all, std::int64_t sequence, std::int64_t head) const {
    return all.rows_from(sequence * shape.length, shape.length).columns_from(head * shape.head_size, shape.head_size);
  }
  AnyMatrix key(const AnyMatrix& all, std::int64_t sequence, std::int64_t head) const {
    return query(all, sequence, head / group());
  }
  std::int64_t group() const { return shape.heads / shape.kv_heads; }
};

void form_probabilities(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix scores, Array<float> log_sum, Array<std::byte> workspace) {
  const Views view{shape};
  for_heads(shape, [&](std::int64_t sequence, std::int64_t head) {
    kernels::gemm(execution, 1, view.query(queries, sequence, head), Form::plain, view.key(keys, sequence, head),
                  Form::transposed, 0, view.scores(scores, sequence, head), workspace);
  });
  kernels::softmax_scores(execution, shape, scores, log_sum);
}

void forward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
             AnyMatrix out, Array<float> log_sum, Array<std::byte> memory) {
  const Views view{shape};
  Workspace workspace(shape, queries.type, memory, forward_bytes(execution, shape, queries.type));
  const AnyMatrix probabilities = workspace.scores();
  const Array<std::byte> products = workspace.rest();
  form_probabilities(execution, shape, queries, keys, probabilities, log_sum, products);
  for_heads(shape, [&](std::int64_t sequence, std::int64_t head) {
    kernels::gemm(execution, 1, view.scores(probabilities, sequence, head), Form::plain,
                  view.key(values, sequence, head), Form::plain, 0, view.query(out, sequence, head), products);
  });
}

void backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
              AnyMatrix, Array<const float>, AnyMatrix out_gradient, AnyMatrix dq, AnyMatrix dk, AnyMatrix dv,
              Array<std::byte> memory) {
  const Views view{shape};
  Workspace workspace(shape, queries.type, memory, backward_bytes(execution, shape, queries.type));
  const AnyMatrix probabilities = workspace.scores(), gradient = workspace.scores();
  const Array<float> log_sums = workspace.log_sums();  // as in the forward pass
  const Array<std::byte> products = workspace.rest();
  form_probabilities(execution, shape, queries, keys, probabilities, log_sums, products);
  for_heads(shape, [&](std::int64_t sequence, std::int64_t head) {
    const AnyMatrix upper = view.query(out_gradient, sequence, head);
    const float sum = head % view.group() == 0 ? 0.0f : 1.0f;  // adds up the query heads that share a key head
    kernels::gemm(execution, 1, view.scores(probabilities, sequence, head), Form::transposed, upper, Form::plain, sum,
                  view.key(dv, sequence, head), products);
    kernels::gemm(execution, 1, upper, Form::plain, view.key(values, sequence, head), Form::transposed, 0,
                  view.scores(gradient, sequence, head), products);
  });
  kernels::softmax_scores_backward(execution, shape, probabilities, log_sums, gradient);
  for_heads(shape, [&](std::int64_t sequence, std::int64_t head) {
    const AnyMatrix scores = view.scores(gradient, sequence, head);
    const float sum = head % view.group() == 0 ? 0.0f : 1.0f;
    kernels::gemm(execution, 1, scores, Form::plain, view.key(keys, sequence, head), Form::plain, 0,
                  view.query(dq, sequence, head), products);
    kernels::gemm(execution, 1, scores, Form::transposed, view.query(queries, sequence, head), Form::plain, sum,
                  view.key(dk, sequence, head), products);
  });
}

}  // namespace

language_model::AttentionKernels matrix_attention() {
  return {.workspace = forward_bytes, .backward_workspace = backward_bytes, .forward = forward, .backward = backward};
}

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// Attention by cuDNN on a GPU. Without the library (WEFT_CUDNN) the test counts as skipped.
#include "kernels/language/attention/attention_cudnn.hpp"

#include <functional>

#include "device/stream.hpp"
#include "kernels/language/attention/attention_tuning.hpp"
#include "tests/kernels/language/attention_problem.hpp"

namespace weft::testing {

using kernels::AttentionPass;

namespace {

/// ctest counts the program as skipped if it prints this.
bool library_is_absent() {
  if (kernels::cudnn::version() != 0) return false;
  MESSAGE("cuDNN is absent: " << kernels::cudnn::absence());
  return true;
}

Execution on_gpu() {
  Execution execution = testing::execution();
  execution.backend = kernels::Backend::cuda;
  return execution;
}

Problem problem_of(Case c, AttentionImplementation implementation) {
  c.type = Scalar::bf16;
  Problem problem(c);
  problem.shape.implementation = implementation;
  return problem;
}

/// What the last call of these sizes ran on.
AttentionImplementation used(AttentionPass pass, const Problem& problem) {
  const kernels::AttentionSizes sizes = attention_sizes(pass, problem.shape, Scalar::bf16);
  for (const kernels::AttentionRecord& record : kernels::attention_records_in_use())
    if (record.sizes == sizes) return record.implementation;
  return AttentionImplementation::recorded;  // none
}

void check_results(const Results& x, const Reference& r) {
  // Results are rounded to 2^-9, and a kernel may round probabilities and their gradients before the second product.
  constexpr double kTolerance = 5e-3;
  CHECK(relative_error(x.out, r.out) <= kTolerance);
  CHECK(relative_error(x.log_sum, r.log_sum) <= 1e-5);  // fp32
  CHECK(relative_error(x.dq, r.dq) <= kTolerance);
  CHECK(relative_error(x.dk, r.dk) <= kTolerance);
  CHECK(relative_error(x.dv, r.dv) <= kTolerance);
}

bool same_bits(const Results& x, const Results& y) {
  return x.out == y.out && x.log_sum == y.log_sum && x.dq == y.dq && x.dk == y.dk && x.dv == y.dv;
}

Case windowed() {
  Case c{3, 200, 4, 2, 64};
  c.window = 70;
  return c;
}

/// Strided, groups of heads, lengths around multiples of blocks, several sequences, a window.
std::vector<Case> cases() {
  return {{2, 96, 8, 2, 64},  {2, 96, 8, 2, 128},  {1, 17, 2, 1, 32},
          {3, 200, 4, 4, 64}, {1, 300, 2, 1, 128}, windowed()};
}

}  // namespace

TEST_CASE("cuDNN's attention and gradients agree with the definition, and so do the own kernels") {
  if (library_is_absent()) return;
  for (const Case& c : cases())
    for (const AttentionImplementation implementation :
         {AttentionImplementation::cudnn, AttentionImplementation::own}) {
      CAPTURE(c.length);
      CAPTURE(c.heads);
      CAPTURE(c.head_size);
      CAPTURE(c.window);
      CAPTURE(static_cast<int>(implementation));
      Problem problem = problem_of(c, implementation);
      problem.reference.compute();
      check_results(problem.run(on_gpu()), problem.reference);
      if (implementation == AttentionImplementation::own) continue;
      CHECK(used(AttentionPass::forward, problem) == AttentionImplementation::cudnn);
      CHECK(used(AttentionPass::backward, problem) == AttentionImplementation::cudnn);
    }
}

TEST_CASE("the gradients of one implementation fit the forward pass of the other") {
  if (library_is_absent()) return;
  for (const Case& c : {Case{2, 96, 8, 2, 64}, Case{1, 300, 2, 1, 128}})
    for (const auto& [forward, backward] : {std::pair{AttentionImplementation::own, AttentionImplementation::cudnn},
                                            std::pair{AttentionImplementation::cudnn, AttentionImplementation::own}}) {
      CAPTURE(c.head_size);
      CAPTURE(static_cast<int>(forward));
      Problem problem = problem_of(c, forward);
      problem.reference.compute();
      check_results(problem.run(on_gpu(), backward, [](const auto& launch) { launch(); }), problem.reference);
    }
}

TEST_CASE("equal calls give equal bits, also replayed as a graph") {
  if (library_is_absent()) return;
  // Enough blocks to be computed in another order each time if they could.
  for (const Case& c : {Case{8, 512, 8, 8, 64}, Case{4, 512, 8, 2, 128}}) {
    CAPTURE(c.head_size);
    const Problem problem = problem_of(c, AttentionImplementation::cudnn);
    const Execution execution = on_gpu();
    const Results first = problem.run(execution);
    REQUIRE(used(AttentionPass::backward, problem) == AttentionImplementation::cudnn);
    for (int i = 0; i < 3; ++i) CHECK(same_bits(first, problem.run(execution)));
    const Results replayed =
        problem.run(execution, AttentionImplementation::cudnn, [&](const std::function<void()>& launch) {
          device::Graph graph;
          graph.capture(execution, launch);
          for (int i = 0; i < 2; ++i) graph.replay(execution);
          kernels::fence(execution);
        });
    CHECK(same_bits(first, replayed));
  }
}

TEST_CASE("a record chooses the implementation; without one the own kernels run") {
  if (library_is_absent()) return;
  Problem problem = problem_of({2, 160, 4, 2, 64}, AttentionImplementation::recorded);
  problem.reference.compute();
  const Execution execution = on_gpu();
  check_results(problem.run(execution), problem.reference);
  CHECK(used(AttentionPass::forward, problem) == AttentionImplementation::own);
  kernels::AttentionRecord record;
  for (const kernels::AttentionRecord& each : kernels::attention_records_in_use())
    if (each.sizes == attention_sizes(AttentionPass::backward, problem.shape, Scalar::bf16)) record = each;
  record.library = kernels::cudnn::version();
  record.implementation = AttentionImplementation::cudnn;

  kernels::AttentionRecord foreign = record;
  foreign.gpu = "another GPU";
  kernels::use_attention_records({foreign});
  check_results(problem.run(execution), problem.reference);
  CHECK(used(AttentionPass::backward, problem) == AttentionImplementation::own);

  foreign = record;
  foreign.library = 1;
  kernels::use_attention_records({foreign});
  CHECK(planned_attention(AttentionPass::backward, problem.shape, Scalar::bf16) == AttentionImplementation::own);

  Problem other = problem_of({2, 224, 4, 2, 64}, AttentionImplementation::recorded);
  other.reference.compute();
  record.sizes.length = 224;
  kernels::use_attention_records({record});
  check_results(other.run(execution), other.reference);
  CHECK(used(AttentionPass::forward, other) == AttentionImplementation::own);
  CHECK(used(AttentionPass::backward, other) == AttentionImplementation::cudnn);
  kernels::use_attention_records({});
}

TEST_CASE("what cuDNN does not have runs on the own kernels") {
  if (library_is_absent()) return;
  Case c{1, 130, 2, 1, 64};
  for (int feature = 0; feature < 4; ++feature) {
    CAPTURE(feature);
    Case one = c;
    one.softcap = feature == 0 ? 3.0f : 0.0f;
    one.documents = feature == 1;
    one.sparse = feature == 2;
    one.dropout = feature == 3 ? 0.2f : 0.0f;
    Problem problem = problem_of(one, AttentionImplementation::cudnn);
    problem.reference.compute();
    check_results(problem.run(on_gpu()), problem.reference);
    CHECK(used(AttentionPass::forward, problem) == AttentionImplementation::recorded);
  }
}

TEST_CASE("the faster implementation is recorded") {
  if (library_is_absent()) return;
  const Problem problem = problem_of({2, 128, 4, 2, 64}, AttentionImplementation::own);
  const std::int64_t rows = problem.reference.rows(), columns = problem.reference.query_columns(),
                     packed = columns + 2 * problem.reference.key_columns();
  const TestMatrix inputs(random_floats(rows * packed, 1), rows, packed, Scalar::bf16),
      gradients(std::vector<float>(rows * packed), rows, packed, Scalar::bf16),
      out(std::vector<float>(rows * columns), rows, columns, Scalar::bf16),
      out_gradient(random_floats(rows * columns, 2), rows, columns, Scalar::bf16);
  const DeviceArray<float> log_sum(rows * 4);
  for (const AttentionPass pass : {AttentionPass::forward, AttentionPass::backward}) {
    kernels::AttentionRecord given;
    given.sizes = attention_sizes(pass, problem.shape, Scalar::bf16);
    const device::Buffer<std::byte> workspace(kernels::tuning_workspace(on_gpu(), given.sizes));
    const kernels::AttentionRecord best = tune_attention(
        on_gpu(), given,
        {inputs.view(), gradients.view(), out.view(), out_gradient.view(), log_sum.array(), workspace.array()});
    CHECK(best.own_milliseconds > 0);
    CHECK(best.cudnn_milliseconds > 0);
    CHECK(best.library == kernels::cudnn::version());
    CHECK((best.implementation == AttentionImplementation::cudnn) == (best.cudnn_milliseconds < best.own_milliseconds));
  }
}

}  // namespace weft::testing

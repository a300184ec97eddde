// SPDX-License-Identifier: Apache-2.0
//
// Shared by the tests of attention: a case in the memory of the kernels.
#pragma once

#include "tests/kernels/language/attention_reference.hpp"

namespace weft::testing {

using kernels::AdamStep;
using kernels::Attention;
using kernels::AttentionImplementation;
using kernels::Execution;

struct Results {
  std::vector<float> out, log_sum, dq, dk, dv;
};

/// The inputs of a case in the memory of the kernels.
struct Problem {
  Case c;
  Reference reference;
  TestMatrix inputs, out_gradient;
  DeviceArray<std::int32_t> first_key;
  DeviceArray<std::uint8_t> kept;
  DeviceArray<AdamStep> step;
  Attention shape;

  explicit Problem(const Case& case_)
      : c(case_),
        reference(c),
        inputs(reference.packed, reference.rows(), reference.stride(), c.type),
        out_gradient({reference.out_gradient.begin(), reference.out_gradient.end()}, reference.rows(),
                     reference.query_columns(), c.type),
        first_key(reference.first_key),
        kept(reference.kept),
        step(std::vector<AdamStep>(1, adam_step())),
        shape(reference.shape) {
    if (c.documents) shape.first_key = first_key.array();
    if (c.sparse) shape.kept = kept.array();
    if (c.dropout > 0) shape.dropout = {c.dropout, kDropoutLayer, c.first_row, 0, step.array().data};
  }
  static AdamStep adam_step() {
    AdamStep step{};
    step.seed = kDropoutSeed;
    step.step = kDropoutStep;
    return step;
  }
  AnyMatrix queries(const TestMatrix& packed) const { return packed.view().columns_from(0, reference.query_columns()); }
  AnyMatrix keys(const TestMatrix& packed) const {
    return packed.view().columns_from(reference.query_columns(), reference.key_columns());
  }
  AnyMatrix values(const TestMatrix& packed) const {
    return packed.view().columns_from(reference.query_columns() + reference.key_columns(), reference.key_columns());
  }

  /// Forward and backward pass. `submit(launch)` calls launch() once its work is prepared; by default at once.
  /// `backward`: what computes the gradients after the forward pass of `shape`.
  template <class Submit>
  Results run(const Execution& execution, AttentionImplementation backward, const Submit& submit) const {
    Attention later = shape;
    later.implementation = backward;
    const std::int64_t rows = reference.rows(), columns = reference.query_columns(), width = reference.key_columns();
    const TestMatrix out(std::vector<float>(rows * columns, std::nanf("")), rows, columns, c.type);
    const TestMatrix gradients(std::vector<float>(rows * reference.stride(), std::nanf("")), rows, reference.stride(),
                               c.type);
    const DeviceArray<float> log_sum(c.sequences * c.heads * c.length);
    const device::Buffer<std::byte> workspace(std::max({std::int64_t{1}, attention_workspace(execution, shape, c.type),
                                                        attention_backward_workspace(execution, later, c.type)}));
    submit([&] {
      attention(execution, shape, queries(inputs), keys(inputs), values(inputs), out.view(), log_sum.array(),
                workspace.array());
      attention_backward(execution, later, queries(inputs), keys(inputs), values(inputs), out.view(), log_sum.array(),
                         out_gradient.view(), queries(gradients), keys(gradients), values(gradients),
                         workspace.array());
    });
    const std::vector<float> packed = gradients.values();
    const std::vector<float> gaps = reference.part<float>(packed, reference.stride() - kGap, kGap);
    REQUIRE(std::all_of(gaps.begin(), gaps.end(), [](float value) { return std::isnan(value); }));
    return {out.values(), log_sum.values(), reference.part<float>(packed, 0, columns),
            reference.part<float>(packed, columns, width), reference.part<float>(packed, columns + width, width)};
  }
  Results run(const Execution& execution) const {
    return run(execution, shape.implementation, [](const auto& launch) { launch(); });
  }
};

}  // namespace weft::testing

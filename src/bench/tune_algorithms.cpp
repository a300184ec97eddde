// SPDX-License-Identifier: Apache-2.0
#include "bench/tune_algorithms.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "kernels/language/attention/attention_tuning.hpp"
#include "kernels/optimize/adam.hpp"
#include "run/algorithms.hpp"

namespace weft::bench {
namespace {

using kernels::AttentionImplementation;
using kernels::AttentionPass;
using kernels::AttentionRecord;
using kernels::AttentionSizes;
using kernels::Epilogue;
using kernels::Scalar;
using kernels::cuda::GemmRecord;
using kernels::cuda::GemmShape;

/// Random bf16 numbers: on zeros a GPU draws less power and runs faster than on data.
device::Buffer<std::byte> random_rows(const kernels::Execution& execution, std::int64_t rows, std::int64_t stride) {
  device::Buffer<std::byte> memory(2 * rows * stride);
  const kernels::ParameterRows matrix{.storage = kernels::StorageType::bf16,
                                      .rows = rows,
                                      .columns = stride,
                                      .segment = stride,
                                      .weight = memory.data()};
  kernels::initialise_uniform(execution, matrix, 1.0f, 1, kernels::Purpose::benchmark);
  return memory;
}

GemmRecord tuned(const kernels::Execution& execution, const GemmRecord& record) {
  if constexpr (!kernels::kCudaBuild) {
    static_cast<void>(execution);
    return record;
  } else {
    const GemmShape& shape = record.shape;
    if (shape.input == Scalar::u8) return record;  // products in codes keep the library's first proposal
    const std::int64_t words = kernels::bytes_of(shape.input) / 2;
    // Rows of all matrices of a batch.
    const auto of_batch = [&](std::int64_t rows, std::int64_t stride, std::int64_t distance) {
      return rows + ((shape.batch.count - 1) * distance + stride - 1) / stride;
    };
    const device::Buffer<std::byte> a = random_rows(
        execution,
        of_batch(shape.a_form == kernels::Form::plain ? shape.rows : shape.inner, shape.a_stride, shape.batch.a),
        words * shape.a_stride);
    const device::Buffer<std::byte> b = random_rows(
        execution,
        of_batch(shape.b_form == kernels::Form::plain ? shape.inner : shape.columns, shape.b_stride, shape.batch.b),
        words * shape.b_stride);
    const device::Buffer<std::byte> c(of_batch(shape.rows, shape.c_stride, shape.batch.c) * shape.c_stride *
                                      kernels::bytes_of(shape.output)),
        workspace(kernels::cuda::kGemmWorkspace);
    // The operands of an epilogue.
    const device::Buffer<std::byte> bias = random_rows(execution, 1, shape.columns),
                                    hidden = random_rows(execution, shape.rows, shape.hidden_stride);
    const Epilogue epilogue{
        shape.epilogue, bias.data(), {hidden.data(), Scalar::bf16, shape.rows, shape.columns, shape.hidden_stride}};
    const GemmRecord best =
        kernels::cuda::Gemm::tune(execution, shape, a.data(), b.data(), c.data(), workspace.array(), epilogue);
    const double teraflops = 2e-9 * static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
                             static_cast<double>(shape.inner) / std::max(best.milliseconds, 1e-9);
    log::info("{} x {} x {}: {:.4f} ms, {:.0f} TFLOP/s{}", shape.rows, shape.inner, shape.columns, best.milliseconds,
              teraflops, best.algorithm == record.algorithm ? " (the first that the library proposes)" : "");
    return best;
  }
}

AttentionRecord tuned(const kernels::Execution& execution, const AttentionRecord& record) {
  if constexpr (!kernels::kCudnnBuild) {
    static_cast<void>(execution);
    return record;
  } else {
    const AttentionSizes& sizes = record.sizes;
    const std::int64_t rows = sizes.sequences * sizes.length, columns = sizes.heads * sizes.head_size,
                       packed = columns + 2 * sizes.kv_heads * sizes.head_size;
    // Numbers of two bytes; those of fp16 are random bits of bf16, which are finite.
    const device::Buffer<std::byte> inputs = random_rows(execution, rows, packed),
                                    out_gradient = random_rows(execution, rows, columns), gradients(2 * rows * packed),
                                    out(2 * rows * columns), workspace(kernels::tuning_workspace(execution, sizes));
    const device::Buffer<float> log_sum(rows * sizes.heads);
    const auto matrix = [&](const device::Buffer<std::byte>& memory, std::int64_t width) {
      return kernels::AnyMatrix{memory.data(), sizes.type, rows, width, width};
    };
    const AttentionRecord best =
        kernels::tune_attention(execution, record,
                                {matrix(inputs, packed), matrix(gradients, packed), matrix(out, columns),
                                 matrix(out_gradient, columns), log_sum.array(), workspace.array()});
    log::info("attention {}, {} x {} rows, {} heads of {}: own {:.4f} ms, cuDNN {}",
              sizes.pass == AttentionPass::forward ? "forward" : "backward", sizes.sequences, sizes.length, sizes.heads,
              sizes.head_size, best.own_milliseconds,
              best.cudnn_milliseconds > 0 ? fmt::format("{:.4f} ms", best.cudnn_milliseconds)
              : best.library > 0          ? "does not take it"
                                          : "is absent (" + kernels::cudnn::absence() + ")");
    return best;
  }
}

}  // namespace

void tune_algorithms(const kernels::Execution& execution, const std::filesystem::path& file) {
  Json all = Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use())
      all.push_back(run::to_json(tuned(execution, record)));
  for (const AttentionRecord& record : kernels::attention_records_in_use())
    all.push_back(run::to_json(tuned(execution, record)));
  storage::write_json(file, {{"algorithms", all}});
  log::info("written to {}; name it as device.algorithms in an input", file.string());
}

}  // namespace weft::bench

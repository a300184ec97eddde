// SPDX-License-Identifier: Apache-2.0
//
// The dense product that the selection reads, compared with float64.
#include "kernels/gemm/gemm_cuda.hpp"
#include "tests/gpu/select_inputs.hpp"

namespace weft::testing {
namespace {

/// Compared with float64 products of the stored values.
struct GemmCase {
  std::int64_t n, f, d, input_stride, weight_stride, product_stride, alignment;
};

TEST_CASE("the dense product agrees with float64, in fp32 and bf16, captured or not") {
  const Stream stream;
  const Execution execution = stream.execution();
  for (const GemmCase& c :
       {GemmCase{67, 1000, 768, 768, 768, 1000, 16}, {1, 8, 16, 48, 16, 8, 16}, {129, 520, 770, 2310, 770, 520, 4}})
    for (const auto& [in, out] :
         {std::pair{Scalar::fp32, Scalar::fp32}, {Scalar::bf16, Scalar::bf16}, {Scalar::bf16, Scalar::fp32}}) {
      CAPTURE(c.n);
      CAPTURE(static_cast<int>(in));
      CAPTURE(static_cast<int>(out));
      Random random{21};
      const auto fill = [&](std::int64_t n) {
        std::vector<float> values(static_cast<std::size_t>(n));
        for (float& value : values) {
          value = random.normal();
          if (in == Scalar::bf16) value = static_cast<float>(to_bf16(value));
        }
        return values;
      };
      const auto stored = [&](const std::vector<float>& values) {
        std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(bytes_of(in)));
        for (std::size_t i = 0; i < values.size(); ++i)
          if (in == Scalar::bf16) {
            const bf16 value = to_bf16(values[i]);
            std::memcpy(bytes.data() + 2 * i, &value, 2);
          } else {
            std::memcpy(bytes.data() + 4 * i, &values[i], 4);
          }
        return bytes;
      };
      const std::vector<float> input = fill(c.n * c.input_stride), weight = fill(c.f * c.weight_stride);
      const Buffer<std::byte> input_buffer(stored(input)), weight_buffer(stored(weight));
      Buffer<std::byte> product(c.n * c.product_stride * bytes_of(out)), workspace(32 << 20);
      cuda::GemmShape shape{c.n, c.f, c.d, c.input_stride, c.weight_stride, c.product_stride, in, out, c.alignment};
      const cuda::Gemm first(shape, 32 << 20);
      // A record chooses the same algorithm again; one of another GPU is ignored.
      const cuda::Gemm gemm(shape, 32 << 20, &first.record());
      CHECK(gemm.record().algorithm == first.record().algorithm);
      cuda::GemmRecord foreign = first.record();
      foreign.gpu = "another";
      CHECK(cuda::Gemm(shape, 32 << 20, &foreign).record().gpu == cuda::gpu_name());

      product.poison();
      gemm.run(execution, input_buffer.data(), weight_buffer.data(), product.data(), workspace.array());
      cuda_ok(cudaStreamSynchronize(stream.stream));
      const auto once = product.read(c.n * c.product_stride * bytes_of(out));
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t ready = nullptr;
      product.poison();
      cuda_ok(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeRelaxed));
      gemm.run(execution, input_buffer.data(), weight_buffer.data(), product.data(), workspace.array());
      cuda_ok(cudaStreamEndCapture(stream.stream, &graph));
      cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
      cuda_ok(cudaGraphLaunch(ready, stream.stream));
      cuda_ok(cudaStreamSynchronize(stream.stream));
      CHECK(product.read(c.n * c.product_stride * bytes_of(out)) == once);
      cudaGraphExecDestroy(ready);
      cudaGraphDestroy(graph);

      double worst = 0;
      for (std::int64_t n = 0; n < c.n; ++n)
        for (std::int64_t f = 0; f < c.f; ++f) {
          double sum = 0, absolute = 0;
          for (std::int64_t i = 0; i < c.d; ++i) {
            const double term = static_cast<double>(input[static_cast<std::size_t>(n * c.input_stride + i)]) *
                                static_cast<double>(weight[static_cast<std::size_t>(f * c.weight_stride + i)]);
            sum += term;
            absolute += std::fabs(term);
          }
          const std::size_t at = static_cast<std::size_t>(n * c.product_stride + f);
          double got;
          if (out == Scalar::bf16) {
            bf16 value;
            std::memcpy(&value, once.data() + 2 * at, 2);
            got = static_cast<double>(static_cast<float>(value));
          } else {
            float value;
            std::memcpy(&value, once.data() + 4 * at, 4);
            got = static_cast<double>(value);
          }
          // d terms summed in fp32 (the tensor cores may truncate: 2^-22 per term), then one rounding to the stored
          // type.
          const double bound =
              static_cast<double>(c.d) * 0x1p-22 * absolute + (out == Scalar::bf16 ? 0x1p-8 : 0x1p-23) * std::fabs(sum);
          worst = std::max(worst, std::fabs(got - sum) / bound);
        }
      CHECK(worst <= 1.0);
    }
}

}  // namespace
}  // namespace weft::testing

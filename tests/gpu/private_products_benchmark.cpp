// SPDX-License-Identifier: Apache-2.0
//
// Rates of the products of private training (kernels/privacy/fused.hpp), bf16, as a fraction of the dense library's
// rate for a square product, measured in the same run:
//
//   norms    add_product_norms, input_length: 2 n in out operations
//   gram     add_product_norms, width: T (T + 128) (in + out) per example
//   sums     add_clipped_product: 2 n in out
//   columns  form_column_sums of the output gradients: GB/s, 2 n out bytes
//   library  one product over all rows, the weight gradient of a step without privacy: 2 n in out
//
// Each by the own kernels and by the dense library (products.hpp).
//
//   private_products_benchmark [--repeat 7]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/privacy/clipped_sums.hpp"
#include "kernels/privacy/norms.hpp"
#include "kernels/privacy/tiles.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

const Execution kExecution{.backend = Backend::cuda};

double median_us(int repeat, const std::function<void()>& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  for (int i = 0; i < 2; ++i) body();
  std::vector<float> time(static_cast<std::size_t>(repeat));
  for (float& t : time) {
    check_cuda(cudaEventRecord(begin), "event");
    body();
    check_cuda(cudaEventRecord(end), "event");
    check_cuda(cudaEventSynchronize(end), "event");
    check_cuda(cudaEventElapsedTime(&t, begin, end), "event");
  }
  check_cuda(cudaEventDestroy(begin), "event");
  check_cuda(cudaEventDestroy(end), "event");
  std::sort(time.begin(), time.end());
  return static_cast<double>(time[time.size() / 2]) * 1e3;
}

/// Numbers of the deviation of activations: products of zeros take less power, and are faster. They repeat.
DeviceArray<std::uint16_t> random_rows(std::int64_t size, std::uint64_t state) {
  constexpr std::int64_t kPeriod = 999'983;  // a prime
  std::vector<std::uint16_t> values(static_cast<std::size_t>(std::min(size, kPeriod)));
  for (std::uint16_t& value : values) {
    float sum = -2.0f;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state >> 40) * 0x1p-24f;
    }
    value = to_bf16(sum).bits;
  }
  DeviceArray<std::uint16_t> rows(size);
  for (std::int64_t at = 0; at < size; at += kPeriod)
    check_cuda(cudaMemcpy(rows.data() + at, values.data(), 2 * static_cast<std::size_t>(std::min(kPeriod, size - at)),
                          cudaMemcpyHostToDevice),
               "rows");
  return rows;
}

AnyMatrix rows_of(const DeviceArray<std::uint16_t>& values, std::int64_t columns) {
  return {values.data(), Scalar::bf16, values.size() / columns, columns, columns};
}

double library_us(int repeat, AnyMatrix g, AnyMatrix x) {
  const DeviceArray<float> out(g.columns * x.columns);
  const DeviceArray<std::byte> work(gemm_workspace(g.type, x.type, Scalar::fp32, g.columns, x.columns, x.rows));
  return median_us(repeat, [&] {
    gemm(kExecution, 1, g, Form::transposed, x, Form::plain, 0,
         {out.data(), Scalar::fp32, g.columns, x.columns, x.columns}, work.array());
  });
}

/// |a - b| / |b|
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double of_both = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    of_both += d * d;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(of_both / size);
}

void run(int repeat, double peak, std::int64_t in, std::int64_t out, std::int64_t examples, std::int64_t length) {
  const std::int64_t n = examples * length;
  const DeviceArray<std::uint16_t> inputs = random_rows(n * in, 1), gradients = random_rows(n * out, 2);
  const AnyMatrix x = rows_of(inputs, in), g = rows_of(gradients, out);
  std::vector<std::int64_t> offsets;
  for (std::int64_t e = 0; e <= examples; ++e) offsets.push_back(e * length);
  const DeviceArray<std::int64_t> device_offsets(offsets);
  const Examples view{offsets, device_offsets.array()};
  const ExampleSizes sizes{examples, length, n};
  std::vector<float> some;
  for (std::int64_t e = 0; e < examples; ++e) some.push_back(1.0f / (1.5f + static_cast<float>(e)));
  const DeviceArray<float> factors(some);
  const DeviceArray<double> norms(std::vector<double>(static_cast<std::size_t>(examples)));

  std::printf("%6lld x %5lld, %2lld x %4lld", static_cast<long long>(out), static_cast<long long>(in),
              static_cast<long long>(examples), static_cast<long long>(length));
  const auto print = [&](const char* name, double operations, double us) {
    std::printf("  %s %8.1f us %4.0f %3.0f %%", name, us, operations / us * 1e-6, 100 * operations / us * 1e-6 / peak);
  };
  const double direct = norm_cost(NormAlgorithm::direct, in, out, length, 0) * static_cast<double>(examples),
               gram = norm_cost(NormAlgorithm::gram, in, out, length, kTileSide) * static_cast<double>(examples);
  std::vector<std::vector<float>> results;
  for (const ProductImplementation by : {ProductImplementation::fused, ProductImplementation::library}) {
    const auto norms_us = [&](NormAlgorithm algorithm) {
      const NormMethod method{algorithm, 0, by};
      const DeviceArray<std::byte> work(product_norms_workspace(x.type, g.type, in, out, sizes, method));
      return median_us(repeat, [&] { add_product_norms(kExecution, x, g, view, method, norms.array(), work.array()); });
    };
    std::printf(by == ProductImplementation::fused ? "\n    own:    " : "\n    library:");
    print("norms", direct, norms_us(NormAlgorithm::direct));
    print("gram", gram, norms_us(NormAlgorithm::gram));
    const DeviceArray<float> sum(std::vector<float>(static_cast<std::size_t>(in * out)));
    const DeviceArray<std::byte> work(clipped_product_workspace(x.type, g.type, in, out, sizes, by));
    add_clipped_product(kExecution, x, g, view, factors.array(), {sum.data(), out, in, in}, work.array(), by);
    results.push_back(sum.download());
    print("sums", direct, median_us(repeat, [&] {
            add_clipped_product(kExecution, x, g, view, factors.array(), {sum.data(), out, in, in}, work.array(), by);
          }));
  }
  print("one product", direct, library_us(repeat, g, x));
  std::printf("\n    sums differ by %.1e of the library's", difference(results[0], results[1]));
  const DeviceArray<float> columns(examples * out);
  const double columns_us = median_us(repeat, [&] {
    form_column_sums(kExecution, g, view, {columns.data(), examples, out, out});
  });
  std::printf("; columns %8.1f us %5.0f GB/s", columns_us, 2e-3 * static_cast<double>(n * out) / columns_us);
  std::printf("\n");
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  using namespace weft::testing;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  int repeat = 7;
  if (argc == 3 && std::string(argv[1]) == "--repeat") {
    repeat = std::stoi(argv[2]);
  } else if (argc != 1) {
    std::fprintf(stderr, "private_products_benchmark [--repeat N]\n");
    return 2;
  }
  weft::kernels::start(1, 0);
  constexpr std::int64_t kSquare = 8192;
  const DeviceArray<std::uint16_t> square = random_rows(kSquare * kSquare, 3);
  const double us = library_us(repeat, rows_of(square, kSquare), rows_of(square, kSquare)),
               peak = 2.0 * kSquare * kSquare * kSquare / us * 1e-6;
  std::printf("square product of %lld: %.0f TFLOP/s\nout x in, examples x rows: us, TFLOP/s, of the square product\n",
              static_cast<long long>(kSquare), peak);
  for (const auto& [in, out] : {std::pair<std::int64_t, std::int64_t>{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}})
    run(repeat, peak, in, out, 16, 1024);
  run(repeat, peak, 768, 50304, 2, 1024);
  run(repeat, peak, 768, 50304, 16, 1024);
  for (const auto& [in, out] : {std::pair<std::int64_t, std::int64_t>{2048, 16384}, {8192, 2048}, {2048, 3072}})
    run(repeat, peak, in, out, 4, 2048);
  weft::kernels::stop();
  return 0;
}

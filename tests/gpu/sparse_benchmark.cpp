// SPDX-License-Identifier: Apache-2.0
//
// Times the CUDA kernels of the sparse half of the step, one by one, on prepared lists: milliseconds (median), the
// bytes they must move and what part of the limit that is. Which limit: the measured copy rate of device memory for
// what passes through once, and the L2's measured gather rate for rows that are gathered.
//
//   sparse_benchmark [--layers 12] [--d 768] [--features 32768] [--tokens 4096] [--k 32] [--zipf 0.8] [--storage 8bit]
//   [--repeat 15]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/metrics/metric_sums.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

// One H200 as measured (docs/performance.md): copy of 4 GiB, and rows gathered from a table that stays in L2.
constexpr double kCopyRate = 4290e9, kGatherRate = 8600e9;

struct Options {
  std::int64_t layers = 12, d = 768, features = 32768, tokens = 4096, k = 32, repeat = 15;
  double zipf = 0.8;
  StorageType storage = StorageType::eight_bit;
};

double median_ms(std::int64_t repeat, const std::function<void()>& body) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    check_cuda(cudaEventCreate(&begin), "event");
    check_cuda(cudaEventCreate(&end), "event");
  }
  for (int i = 0; i < 3; ++i) body();
  check_cuda(cudaDeviceSynchronize(), "warm-up");
  std::vector<float> time(static_cast<std::size_t>(repeat));
  for (float& t : time) {
    check_cuda(cudaEventRecord(begin), "event");
    body();
    check_cuda(cudaEventRecord(end), "event");
    check_cuda(cudaEventSynchronize(end), "event");
    check_cuda(cudaEventElapsedTime(&t, begin, end), "event");
  }
  std::sort(time.begin(), time.end());
  return time[time.size() / 2];
}

std::string label;
void report(const char* what, double ms, double streamed, double gathered) {
  const double floor_ms = 1e3 * std::max(streamed / kCopyRate, gathered / kGatherRate);
  std::printf("%-22s %-34s %8.3f ms  %6.0f GB/s through memory  %6.0f GB/s gathered  %4.0f %% of limit\n",
              label.c_str(), what, ms, streamed / ms / 1e6, gathered / ms / 1e6, 100 * floor_ms / ms);
  std::fflush(stdout);
}

void run(const Options& o) {
  const std::int64_t L = o.layers, d = o.d, F = o.features, N = o.tokens, k = o.k, keys = L * F, nnz = N * L * k,
                     C = L * d;
  const char* storage = o.storage == StorageType::fp32 ? "fp32" : o.storage == StorageType::bf16 ? "bf16" : "8bit";
  char text[64];
  std::snprintf(text, sizeof text, "%s k=%lld %s", storage, static_cast<long long>(k),
                o.zipf == 0 ? "uniform" : "zipf");
  label = text;
  const Execution gpu{Backend::cuda, nullptr};

  // k distinct features for each token and layer; probability of rank r is (r + 1)^-zipf, ranks shuffled over features.
  std::mt19937_64 engine(7);
  const auto uniform = [&] { return static_cast<double>(engine() >> 11) * 0x1p-53; };
  std::vector<double> cumulative(static_cast<std::size_t>(F));
  double total = 0;
  for (std::int64_t r = 0; r < F; ++r) cumulative[r] = total += std::pow(static_cast<double>(r + 1), -o.zipf);
  std::vector<std::uint32_t> permutation(static_cast<std::size_t>(F));
  for (std::int64_t f = 0; f < F; ++f) permutation[f] = static_cast<std::uint32_t>(f);
  std::vector<std::int64_t> row_offsets{0};
  std::vector<std::uint32_t> key;
  std::vector<std::vector<std::uint32_t>> shuffled;
  for (std::int64_t s = 0; s < L; ++s) {
    std::shuffle(permutation.begin(), permutation.end(), engine);
    shuffled.push_back(permutation);
  }
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t s = 0; s < L; ++s) {
      std::vector<std::uint32_t> chosen;
      while (static_cast<std::int64_t>(chosen.size()) < k) {
        const std::int64_t r = std::min<std::int64_t>(
            F - 1, std::lower_bound(cumulative.begin(), cumulative.end(), uniform() * total) - cumulative.begin());
        const std::uint32_t f = shuffled[s][r];
        if (std::find(chosen.begin(), chosen.end(), f) == chosen.end()) chosen.push_back(f);
      }
      std::sort(chosen.begin(), chosen.end());
      for (const std::uint32_t f : chosen) key.push_back(static_cast<std::uint32_t>(s * F) + f);
    }
    row_offsets.push_back(static_cast<std::int64_t>(key.size()));
  }
  std::vector<float> value(key.size());
  for (float& v : value) v = static_cast<float>(0.5 + uniform());
  const DeviceArray<std::int64_t> d_rows(row_offsets);
  const DeviceArray<std::uint32_t> d_key(key);
  const DeviceArray<float> d_value(value);
  DeviceArray<std::int64_t> d_offsets(keys + 1);
  DeviceArray<std::uint32_t> d_token(nnz), d_position(nnz);
  const SparseActivations activations{N, L, F, d_rows.array(), d_key.array(), d_value.array()};
  const FeatureHits hits{d_offsets.array(), d_token.array(), d_position.array()};

  // State: uniform weights, moments of a plausible size.
  struct Memory {
    DeviceArray<std::uint16_t> weight;
    DeviceArray<std::int16_t> rest;
    DeviceArray<std::uint8_t> first, second;
    DeviceArray<float> first_scale, second_scale;
  };
  std::vector<Memory> memories;
  const std::int64_t width = o.storage == StorageType::fp32 ? 4 : o.storage == StorageType::bf16 ? 2 : 1;
  double parameters = 0;
  const auto make = [&](std::int64_t columns) {
    ParameterRows p;
    p.storage = o.storage;
    p.rows = F, p.columns = columns, p.segment = d;
    p.element_base = static_cast<std::uint64_t>(parameters);
    Memory memory{DeviceArray<std::uint16_t>(F * columns),
                  DeviceArray<std::int16_t>(width == 4 ? F * columns : 0),
                  DeviceArray<std::uint8_t>(F * columns * width),
                  DeviceArray<std::uint8_t>(F * columns * width),
                  DeviceArray<float>(width == 1 ? F * p.blocks_per_row() : 0),
                  DeviceArray<float>(width == 1 ? F * p.blocks_per_row() : 0)};
    p.weight = memory.weight.data();
    p.weight_rest = memory.rest.data();
    p.first_moment = memory.first.data();
    p.second_moment = memory.second.data();
    p.first_scale = memory.first_scale.data();
    p.second_scale = memory.second_scale.data();
    initialise_uniform(gpu, p, 0.05f, 3, Purpose::test);
    memory.first.poison(0x38), memory.second.poison(0x34), memory.first_scale.poison(0x34),
        memory.second_scale.poison(0x34);
    memories.push_back(std::move(memory));
    parameters += static_cast<double>(F) * static_cast<double>(columns);
    return p;
  };
  std::vector<ParameterRows> decoder, encoder;
  for (std::int64_t s = 0; s < L; ++s) decoder.push_back(make((L - s) * d));
  const double decoder_parameters = parameters;
  for (std::int64_t s = 0; s < L; ++s) encoder.push_back(make(d));
  const double encoder_parameters = parameters - decoder_parameters;
  std::vector<DeviceArray<float>> bias_memory;
  std::vector<ParameterVector> bias;
  for (std::int64_t s = 0; s < 3 * L; ++s)
    bias_memory.emplace_back(std::vector<float>(static_cast<std::size_t>(F), 1e-6f));
  for (std::int64_t s = 0; s < L; ++s)
    bias.push_back({bias_memory[3 * s].array(), bias_memory[3 * s + 1].array(), bias_memory[3 * s + 2].array()});

  std::vector<std::uint16_t> random_rows(static_cast<std::size_t>(N * C));
  for (std::uint16_t& h : random_rows)
    h = to_bf16(static_cast<float>((uniform() + uniform() + uniform() - 1.5) * 1e-3)).bits;
  const DeviceArray<std::uint16_t> d_g(random_rows), d_target(random_rows);
  DeviceArray<std::uint16_t> d_y(N * C);
  const AnyMatrix g{d_g.data(), Scalar::bf16, N, C, C}, target{d_target.data(), Scalar::bf16, N, C, C},
      y{d_y.data(), Scalar::bf16, N, C, C};
  DeviceArray<float> da(nnz);
  AdamStep step{1e-4f,
                0.9f,
                0.999f,
                0.1f,
                0.001f,
                1e-8f,
                0.0f,
                1.0f / (1.0f - std::pow(0.9f, 20.0f)),
                1.0f / (1.0f - std::pow(0.999f, 20.0f)),
                1.0f,
                11,
                20};
  const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{step});
  DeviceArray<std::byte> workspace(std::max({decode_backward_workspace(Backend::cuda, L, F, d, nnz, false),
                                             encode_backward_workspace(Backend::cuda, L, F, d, nnz),
                                             transpose_workspace(Backend::cuda, keys, nnz), (N + 7) / 8 * L * 24}));

  const double pairs = static_cast<double>(L * (L + 1) / 2), row_bytes = 2.0 * static_cast<double>(N * k * d);
  const double state = o.storage == StorageType::fp32 ? 24 : o.storage == StorageType::bf16 ? 12 : 8.0625;
  double ms = median_ms(o.repeat, [&] { transpose(gpu, activations, hits, workspace.array()); });
  report("transpose", ms, 0, 0);
  const auto offsets = d_offsets.download();
  std::int64_t hot = 0, most = 0, untouched = 0;
  for (std::int64_t i = 0; i < keys; ++i) {
    const std::int64_t h = offsets[i + 1] - offsets[i];
    hot += h > 64, most = std::max(most, h), untouched += h == 0;
  }
  std::printf(
      "%-22s %.3f G decoder parameters; of %lld features a layer %lld above 64 hits, largest %lld, untouched %lld\n",
      label.c_str(), decoder_parameters / 1e9, static_cast<long long>(F), static_cast<long long>(hot / L),
      static_cast<long long>(most), static_cast<long long>(untouched / L));
  ms = median_ms(o.repeat, [&] { decode_forward(gpu, activations, 0, N, decoder, 0, y); });
  report("decode_forward", ms, 2 * decoder_parameters, row_bytes * pairs);
  ms = median_ms(o.repeat, [&] {
    decode_backward_update(gpu, activations, hits, g, decoder, d_step.data(), da.array(), {}, workspace.array(), {}, {},
                           {});
  });
  report("decode_backward_update", ms, state * decoder_parameters, row_bytes * pairs);
  ms = median_ms(o.repeat, [&] {
    encode_backward_update(gpu, activations, hits, target, da.array(), encoder, bias, d_step.data(), {},
                           workspace.array());
  });
  report("encode_backward_update", ms, state * encoder_parameters, row_bytes * static_cast<double>(L));
  DeviceArray<double> norm(keys);
  ms = median_ms(o.repeat, [&] {
    decode_backward_update(gpu, activations, hits, g, decoder, d_step.data(), da.array(), norm.array(),
                           workspace.array(), {}, {}, {});
  });
  report("decode_backward_update with norms", ms, state * decoder_parameters, row_bytes * pairs);
  ms = median_ms(o.repeat, [&] {
    decode_backward_norm(gpu, activations, hits, g, decoder, da.array(), norm.array(), workspace.array(), {}, {});
  });
  report("decode_backward_norm", ms, 2 * decoder_parameters, row_bytes * pairs);
  DeviceArray<double> sums(3 * L);
  DeviceArray<float> vector(std::vector<float>(static_cast<std::size_t>(C), 0.5f)), out(C);
  ms = median_ms(o.repeat, [&] {
    residual_and_loss(gpu, y, 1, target, vector.array(), vector.array(), vector.array(), L, 1e-3f, y,
                      {{sums.data(), L}, {sums.data() + L, L}, {sums.data() + 2 * L, L}}, workspace.array());
  });
  report("residual_and_loss", ms, 6.0 * static_cast<double>(N * C), 0);
  ms = median_ms(o.repeat, [&] { column_sums(gpu, g, out.array()); });
  report("column_sums", ms, 2.0 * static_cast<double>(N * C), 0);
  DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
  ms = median_ms(o.repeat, [&] { normalise_rows(gpu, g, vector.array(), vector.array(), y, flag.data()); });
  report("normalise_rows", ms, 4.0 * static_cast<double>(N * C), 0);
  DeviceArray<std::int64_t> clocks(std::vector<std::int64_t>(static_cast<std::size_t>(keys)));
  ms = median_ms(o.repeat, [&] { advance_clocks(gpu, hits, N, d_step.data(), clocks.array()); });
  report("advance_clocks", ms, 24.0 * static_cast<double>(keys), 0);
  DeviceArray<float> norms(F * L);
  ms = median_ms(o.repeat, [&] { decoder_norms(gpu, decoder, norms.array()); });
  report("decoder_norms", ms, 2.0 * decoder_parameters, 0);
  ms = median_ms(o.repeat, [&] { flag_nonfinite(gpu, decoder[0], flag.data()); });
  report("flag_nonfinite, source 0", ms, state / 2 * static_cast<double>(F * C), 0);
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  weft::testing::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--layers")
      options.layers = std::stoll(value);
    else if (name == "--d")
      options.d = std::stoll(value);
    else if (name == "--features")
      options.features = std::stoll(value);
    else if (name == "--tokens")
      options.tokens = std::stoll(value);
    else if (name == "--k")
      options.k = std::stoll(value);
    else if (name == "--repeat")
      options.repeat = std::stoll(value);
    else if (name == "--zipf")
      options.zipf = std::stod(value);
    else if (name == "--storage")
      options.storage = value == "fp32"   ? weft::kernels::StorageType::fp32
                        : value == "bf16" ? weft::kernels::StorageType::bf16
                                          : weft::kernels::StorageType::eight_bit;
    else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  weft::testing::run(options);
  return 0;
}

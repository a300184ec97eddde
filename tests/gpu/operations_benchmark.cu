// SPDX-License-Identifier: Apache-2.0
//
// Single operations of a language model, bf16: the fused kernel of the program, and the same formula as an array
// library computes it, with a kernel and an array in memory per operation (rows in bf16, arithmetic and statistics of
// rows in fp32). The baseline reads and writes 16 bytes at a time. Times are medians; results of both are compared.
//
//   operations_benchmark [--repeat 31] [--note TEXT]
//
// Writes docs/experiments/operations.json to standard output: scripts/experiments.py makes a table of it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/language/rope/query_key.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

const Execution kExecution{.backend = Backend::cuda};

// --- The baseline: one kernel per operation -------------------------------------------------------------------------

constexpr int kThreads = 256, kWarp = 32, kVector = 8;

struct alignas(16) Vector {
  bf16 value[kVector];
};

/// Rows of `columns` numbers, several of them (`parts`) in each stored row.
struct View {
  bf16* data;
  std::int64_t rows, columns, parts, stride;

  __device__ Vector* vectors(std::int64_t row) const {
    return reinterpret_cast<Vector*>(data + row / parts * stride + row % parts * columns);
  }
};
View view(bf16* data, std::int64_t rows, std::int64_t columns) { return {data, rows, columns, 1, columns}; }

/// out = op(a, operand(row, column))
template <class Op, class Operand>
__global__ void map_kernel(View a, View out, Op op, Operand operand) {
  const std::int64_t width = a.columns / kVector, place = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = place / width, vector = place % width;
  if (row >= a.rows) return;
  const Vector x = a.vectors(row)[vector];
  Vector y;
#pragma unroll
  for (int i = 0; i < kVector; ++i) y.value[i] = to_bf16(op(float(x.value[i]), operand(row, vector * kVector + i)));
  out.vectors(row)[vector] = y;
}
template <class Op, class Operand>
void map(const View& a, const View& out, Op op, Operand operand) {
  const std::int64_t vectors = a.rows * a.columns / kVector;
  map_kernel<<<static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kThreads>>>(a, out, op, operand);
}

struct Plus {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Minus {
  __device__ float operator()(float a, float b) const { return a - b; }
};
struct Times {
  __device__ float operator()(float a, float b) const { return a * b; }
};
struct Exponential {
  __device__ float operator()(float a, float) const { return __expf(a); }
};
struct Sigmoid {
  __device__ float operator()(float a, float) const { return 1.0f / (1.0f + __expf(-a)); }
};

struct Nothing {
  __device__ float operator()(std::int64_t, std::int64_t) const { return 0.0f; }
};
struct Constant {
  float value;
  __device__ float operator()(std::int64_t, std::int64_t) const { return value; }
};
struct OfRow {
  const float* value;
  __device__ float operator()(std::int64_t row, std::int64_t) const { return value[row]; }
};
struct OfColumn {
  const float* value;
  __device__ float operator()(std::int64_t, std::int64_t column) const { return value[column]; }
};
struct OfElement {
  View of;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return float(of.data[row / of.parts * of.stride + row % of.parts * of.columns + column]);
  }
};
/// Cosines or sines of rotary positions: one table row per position, the halves of a head alike.
struct OfPosition {
  const float* table;
  std::int64_t parts, head_size, positions, first;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return table[row / parts % positions * head_size + first + column % (head_size / 2)];
  }
};

enum class Fold { sum, squares, largest };

/// out[row] = finish(sum or maximum over the row); a block per row, or a warp per row.
template <Fold fold, int threads, class Finish>
__global__ void fold_kernel(View a, float* out, Finish finish) {
  __shared__ float parts[kThreads / kWarp];
  const std::int64_t row = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / threads;
  const int lane = static_cast<int>(threadIdx.x) % threads;
  const auto joined = [](float x, float y) { return fold == Fold::largest ? fmaxf(x, y) : x + y; };
  float value = fold == Fold::largest ? -INFINITY : 0.0f;
  if (row < a.rows)
    for (std::int64_t vector = lane; vector < a.columns / kVector; vector += threads) {
      const Vector x = a.vectors(row)[vector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float element = float(x.value[i]);
        value = joined(value, fold == Fold::squares ? element * element : element);
      }
    }
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = joined(value, __shfl_xor_sync(0xffffffffu, value, distance));
  if constexpr (threads > kWarp) {
    if (lane % kWarp == 0) parts[lane / kWarp] = value;
    __syncthreads();
    for (int i = 0; i < threads / kWarp; ++i) value = i == 0 ? parts[0] : joined(value, parts[i]);
  }
  if (row < a.rows && lane == 0) out[row] = finish(value);
}
template <Fold fold, class Finish>
void fold_rows(const View& a, float* out, Finish finish) {
  if (a.columns > 1024)
    fold_kernel<fold, kThreads><<<static_cast<unsigned>(a.rows), kThreads>>>(a, out, finish);
  else
    fold_kernel<fold, kWarp>
        <<<static_cast<unsigned>((a.rows * kWarp + kThreads - 1) / kThreads), kThreads>>>(a, out, finish);
}

struct Same {
  __device__ float operator()(float sum) const { return sum; }
};
struct Mean {
  float columns;
  __device__ float operator()(float sum) const { return sum / columns; }
};
struct InverseDeviation {
  float columns, epsilon;
  __device__ float operator()(float sum) const { return rsqrtf(sum / columns + epsilon); }
};
struct Inverse {
  __device__ float operator()(float sum) const { return 1.0f / sum; }
};

/// out = [-second half | first half] of each row.
__global__ void rotate_half_kernel(View a, View out) {
  const std::int64_t place = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, width = a.columns / kVector,
                     row = place / width, vector = place % width;
  if (row >= a.rows) return;
  const bool first = vector < width / 2;
  Vector x = a.vectors(row)[first ? vector + width / 2 : vector - width / 2];
  if (first)
    for (bf16& value : x.value) value = to_bf16(-float(value));
  out.vectors(row)[vector] = x;
}

/// losses[row] = log(sum) + largest - z_target, from the inverse sum.
__global__ void loss_kernel(View logits, const std::int32_t* targets, const float* largest, const float* inverse,
                            float* losses) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < logits.rows)
    losses[row] = largest[row] - logf(inverse[row]) - float(logits.data[row * logits.stride + targets[row]]);
}
/// p[row, target] -= 1
__global__ void less_target_kernel(View p, const std::int32_t* targets) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  bf16& value = p.data[row * p.stride + targets[row]];
  value = to_bf16(float(value) - 1.0f);
}
unsigned blocks_of(std::int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

// --- Measurement ----------------------------------------------------------------------------------------------------

double median_us(int repeat, const std::function<void()>& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  for (int i = 0; i < 3; ++i) body();
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
  check_cuda(cudaGetLastError(), "kernel");
  std::sort(time.begin(), time.end());
  return static_cast<double>(time[time.size() / 2]) * 1e3;
}

/// About normally distributed, of deviation `scale`; they repeat.
DeviceArray<bf16> random_rows(std::int64_t size, std::uint64_t state, float scale = 1) {
  constexpr std::int64_t kPeriod = 999'983;  // a prime
  std::vector<bf16> values(static_cast<std::size_t>(std::min(size, kPeriod)));
  for (bf16& value : values) {
    float sum = -2.0f;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state >> 40) * 0x1p-24f;
    }
    value = to_bf16(sum * 1.7f * scale);
  }
  DeviceArray<bf16> rows(size);
  for (std::int64_t at = 0; at < size; at += kPeriod)
    check_cuda(
        cudaMemcpy(rows.data() + at, values.data(),
                   sizeof(bf16) * static_cast<std::size_t>(std::min(kPeriod, size - at)), cudaMemcpyHostToDevice),
        "rows");
  return rows;
}

std::vector<float> some(std::int64_t size, float first, float step) {
  std::vector<float> values(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + step * static_cast<float>(i % 17);
  return values;
}

/// |a - b| / |b|
double difference(const DeviceArray<bf16>& a, const DeviceArray<bf16>& b) {
  const std::vector<bf16> x = a.download(), y = b.download();
  double apart = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(float(x[i])) - static_cast<double>(float(y[i]));
    apart += d * d;
    size += static_cast<double>(float(y[i])) * static_cast<double>(float(y[i]));
  }
  return std::sqrt(apart / size);
}

AnyMatrix matrix(const DeviceArray<bf16>& values, std::int64_t columns) {
  return {values.data(), Scalar::bf16, values.size() / columns, columns, columns};
}

class Table {
 public:
  explicit Table(int repeat) : repeat_(repeat) {}

  /// bytes: that the operation must move, at least. apart: relative difference of both results, of one call each.
  void measure(const char* operation, const char* shape, double bytes, const std::function<void()>& unfused,
               const std::function<void()>& fused, const std::function<double()>& apart) {
    unfused();
    fused();
    const double differ = apart(), slow = median_us(repeat_, unfused), fast = median_us(repeat_, fused);
    std::printf(
        "%s\n  {\"operation\": \"%s\", \"shape\": \"%s\", \"unfused_us\": %.1f, \"fused_us\": %.1f, \"bytes\": %.0f, "
        "\"differs\": %.1e}",
        first_ ? "" : ",", operation, shape, slow, fast, bytes, differ);
    std::fflush(stdout);
    first_ = false;
  }

 private:
  const int repeat_;
  bool first_ = true;
};

// --- The operations -------------------------------------------------------------------------------------------------

void norms(Table& table, Norm kind, std::int64_t rows, std::int64_t columns, const char* name, const char* with_sum,
           const char* shape) {
  const DeviceArray<bf16> x = random_rows(rows * columns, 1), addend = random_rows(rows * columns, 2),
                          own(rows * columns), other(rows * columns), sum(rows * columns), own_sum(rows * columns);
  const DeviceArray<float> weight(some(columns, 0.5f, 0.05f)), bias(some(columns, -0.2f, 0.03f)), mean(rows),
      inverse(rows);
  const bool layer = kind == Norm::layer;
  const NormWeights weights{kind, weight.array(), layer ? bias.array() : Array<float>{}, 1e-5f};
  const NormStatistics statistics{layer ? mean.array() : Array<float>{}, inverse.array()};
  const auto width = static_cast<float>(columns);
  const double row_bytes = 2.0 * static_cast<double>(rows * columns);
  const auto baseline = [&](const DeviceArray<bf16>& from) {
    View in = view(from.data(), rows, columns);
    const View out = view(other.data(), rows, columns);
    if (layer) {
      fold_rows<Fold::sum>(in, mean.data(), Mean{width});
      map(in, out, Minus{}, OfRow{mean.data()});
      in = out;
    }
    fold_rows<Fold::squares>(in, inverse.data(), InverseDeviation{width, 1e-5f});
    map(in, out, Times{}, OfRow{inverse.data()});
    map(out, out, Times{}, OfColumn{weight.data()});
    if (layer) map(out, out, Plus{}, OfColumn{bias.data()});
  };
  const auto apart = [&] { return difference(own, other); };
  table.measure(
      name, shape, 2 * row_bytes, [&] { baseline(x); },
      [&] { norm_forward(kExecution, weights, matrix(x, columns), {}, {}, matrix(own, columns), statistics); }, apart);
  table.measure(
      with_sum, shape, 4 * row_bytes,
      [&] {
        map(view(x.data(), rows, columns), view(sum.data(), rows, columns), Plus{},
            OfElement{view(addend.data(), rows, columns)});
        baseline(sum);
      },
      [&] {
        norm_forward(kExecution, weights, matrix(x, columns), matrix(addend, columns), matrix(own_sum, columns),
                     matrix(own, columns), statistics);
      },
      apart);
}

void swiglu(Table& table, std::int64_t rows, std::int64_t columns, const char* shape) {
  const DeviceArray<bf16> x = random_rows(rows * 2 * columns, 3), own(rows * columns), other(rows * columns);
  const View gate{x.data(), rows, columns, 1, 2 * columns}, up{x.data() + columns, rows, columns, 1, 2 * columns},
      out = view(other.data(), rows, columns);
  table.measure(
      "SwiGLU", shape, 6.0 * static_cast<double>(rows * columns),
      [&] {
        map(gate, out, Sigmoid{}, Nothing{});
        map(out, out, Times{}, OfElement{gate});
        map(out, out, Times{}, OfElement{up});
      },
      [&] { mlp_activation(kExecution, MlpActivation::swiglu, matrix(x, 2 * columns), matrix(own, columns)); },
      [&] { return difference(own, other); });
}

/// Norm of heads and rotary positions.
void query_keys(Table& table, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size,
                const char* shape) {
  constexpr std::int64_t kPositions = 2048;
  QueryKey settings{.heads = heads, .kv_heads = kv_heads, .head_size = head_size, .norm = QueryKeyNorm::head};
  const std::int64_t columns = settings.columns(), normed = (heads + kv_heads) * head_size;
  const DeviceArray<bf16> packed = random_rows(rows * columns, 4), own(rows * columns), other(rows * columns),
                          turned(rows * columns);
  const DeviceArray<float> query_weight(some(head_size, 0.6f, 0.04f)), key_weight(some(head_size, 0.8f, 0.02f)),
      inverse(rows * (heads + kv_heads));
  std::vector<float> angles(static_cast<std::size_t>(kPositions * head_size));
  rotary_table(10000, {}, head_size, kPositions, angles.data());
  const DeviceArray<float> rotary(angles);
  std::vector<std::int32_t> places(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int32_t>(i % kPositions);
  const DeviceArray<std::int32_t> positions(places);
  settings.query_weight = query_weight.array();
  settings.key_weight = key_weight.array();
  settings.rotary = rotary.array();
  settings.positions = positions.array();
  // Values pass unchanged: the baseline leaves them where they are.
  check_cuda(cudaMemcpy(other.data(), packed.data(), sizeof(bf16) * static_cast<std::size_t>(packed.size()),
                        cudaMemcpyDeviceToDevice),
             "copy");
  const auto baseline = [&](std::int64_t first, std::int64_t count, const float* weight) {
    const auto of = [&](const DeviceArray<bf16>& array) -> View {
      return {array.data() + first * head_size, rows * count, head_size, count, columns};
    };
    const View in = of(packed), out = of(other), half = of(turned);
    fold_rows<Fold::squares>(in, inverse.data(), InverseDeviation{static_cast<float>(head_size), settings.epsilon});
    map(in, out, Times{}, OfRow{inverse.data()});
    map(out, out, Times{}, OfColumn{weight});
    rotate_half_kernel<<<static_cast<unsigned>((rows * count * head_size / kVector + kThreads - 1) / kThreads),
                         kThreads>>>(out, half);
    map(out, out, Times{}, OfPosition{rotary.data(), count, head_size, kPositions, 0});
    map(half, half, Times{}, OfPosition{rotary.data(), count, head_size, kPositions, head_size / 2});
    map(out, out, Plus{}, OfElement{half});
  };
  table.measure(
      "QK-norm and rotary positions", shape, 4.0 * static_cast<double>(rows * normed),
      [&] {
        baseline(0, heads, query_weight.data());
        baseline(heads, kv_heads, key_weight.data());
      },
      [&] { query_key(kExecution, settings, matrix(packed, columns), matrix(own, columns), inverse.array()); },
      [&] { return difference(own, other); });
}

void cross_entropies(Table& table, std::int64_t rows, std::int64_t vocabulary, const char* shape) {
  const DeviceArray<bf16> logits = random_rows(rows * vocabulary, 5, 2), own(logits.size()), other(logits.size());
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < chosen.size(); ++i)
    chosen[i] = static_cast<std::int32_t>((7919 * i) % static_cast<std::size_t>(vocabulary));
  const DeviceArray<std::int32_t> targets(chosen);
  const float factor = 1.0f / static_cast<float>(rows);
  const DeviceArray<float> scale(std::vector<float>{factor}), losses(rows), largest(rows), inverse(rows);
  const CrossEntropy loss{.vocabulary = vocabulary, .scale = scale.data()};
  const View in = view(logits.data(), rows, vocabulary), out = view(other.data(), rows, vocabulary);
  const auto fused = [&] {
    cross_entropy(kExecution, loss, matrix(own, vocabulary), targets.array(), losses.array(), true);
  };
  const auto restore = [&] {
    check_cuda(cudaMemcpy(own.data(), logits.data(), sizeof(bf16) * static_cast<std::size_t>(own.size()),
                          cudaMemcpyDeviceToDevice),
               "copy");
  };
  restore();
  fused();
  const auto unfused = [&] {
    fold_rows<Fold::largest>(in, largest.data(), Same{});
    map(in, out, Minus{}, OfRow{largest.data()});
    map(out, out, Exponential{}, Nothing{});
    fold_rows<Fold::sum>(out, inverse.data(), Inverse{});
    loss_kernel<<<blocks_of(rows), kThreads>>>(in, targets.data(), largest.data(), inverse.data(), losses.data());
    map(out, out, Times{}, OfRow{inverse.data()});
    less_target_kernel<<<blocks_of(rows), kThreads>>>(out, targets.data());
    map(out, out, Times{}, Constant{factor});
  };
  unfused();
  const double differ = difference(own, other);
  restore();
  table.measure("cross-entropy and its gradient", shape, 4.0 * static_cast<double>(logits.size()), unfused, fused,
                [&] { return differ; });
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  using namespace weft::testing;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: skipped\n");
    return 77;
  }
  int repeat = 31;
  std::string note;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--repeat")
      repeat = std::stoi(argv[i + 1]);
    else if (option == "--note")
      note = argv[i + 1];
    else
      argc = 0;
  }
  if (argc % 2 == 0) {
    std::fprintf(stderr, "operations_benchmark [--repeat N] [--note TEXT]\n");
    return 2;
  }
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, 0), "properties");
  weft::kernels::start(1, 0);
  std::printf("{\"gpu\": \"%s\", \"note\": \"%s\", \"repeat\": %d, \"operations\": [", properties.name, note.c_str(),
              repeat);
  Table table(repeat);
  using weft::kernels::Norm;
  norms(table, Norm::layer, 65536, 768, "LayerNorm", "residual sum and LayerNorm", "65,536 x 768");
  norms(table, Norm::rms, 16384, 2048, "RMSNorm", "residual sum and RMSNorm", "16,384 x 2,048");
  swiglu(table, 16384, 8192, "16,384 x 2 x 8,192");
  query_keys(table, 16384, 16, 8, 128, "16,384 x (16 + 8) x 128");
  cross_entropies(table, 8192, 50304, "8,192 x 50,304");
  cross_entropies(table, 4096, 128256, "4,096 x 128,256");
  std::printf("\n]}\n");
  weft::kernels::stop();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels of the sparse half of the step against plain host loops in fp64: shapes that are not round, empty
// rows, a token with very many active features, features with very many hits, all three storage policies; and the same
// bits in two runs. Exit 77 without a GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include "kernels/transcoder/sparse/sparse.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "kernels/convert/convert.hpp"
#include "kernels/metrics/metrics.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/adam_rule.hpp"
#include "kernels/optimize/codec.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;  // functions under test and their types

const Execution gpu{Backend::cuda, nullptr};
constexpr double kUnit = 0x1p-24;  // unit roundoff of fp32

struct Shape {
  std::int64_t n_tokens, n_layers, n_features, d_model;
  std::int64_t k;
};
std::string name_of(const Shape& s) {
  return "N=" + std::to_string(s.n_tokens) + " L=" + std::to_string(s.n_layers) + " F=" + std::to_string(s.n_features) +
         " d=" + std::to_string(s.d_model) + " k=" + std::to_string(s.k);
}
// 770: no vector path. 384, 8: half-empty chunks. 2048, 2304: several column groups. 4097: more than one block of
// tokens.
const std::vector<Shape> all_shapes = {{1, 1, 33, 8, 5},       {37, 3, 100, 770, 6},    {129, 3, 1000, 384, 7},
                                       {300, 4, 257, 768, 12}, {4097, 2, 1000, 768, 5}, {64, 2, 70, 2048, 9},
                                       {50, 2, 64, 2304, 5},   {40, 2, 65, 13, 4}};
/// All of them, or the one that WEFT_TEST_SHAPE names by its index: racecheck takes minutes for each.
const std::vector<Shape> shapes = [] {
  const char* const only = std::getenv("WEFT_TEST_SHAPE");
  return only == nullptr ? all_shapes : std::vector<Shape>{all_shapes.at(std::stoul(only))};
}();

struct Host {
  std::mt19937_64 engine{20251121};
  double uniform() { return static_cast<double>(engine() >> 11) * 0x1p-53; }
  float normal(double deviation) {  // roughly: the sum of four uniforms
    return static_cast<float>((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508 * deviation);
  }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(uniform() * static_cast<double>(bound)); }
};

struct Batch {
  Shape shape;
  std::vector<std::int64_t> row_offsets;
  std::vector<std::uint32_t> key;
  std::vector<float> value;
  std::vector<std::int64_t> offsets;  // CSC
  std::vector<std::uint32_t> token, position;

  DeviceArray<std::int64_t> d_rows, d_offsets;
  DeviceArray<std::uint32_t> d_key, d_token, d_position;
  DeviceArray<float> d_value;

  SparseActivations activations() const {
    return {shape.n_tokens, shape.n_layers, shape.n_features, d_rows.array(), d_key.array(), d_value.array()};
  }
  FeatureHits hits() const { return {d_offsets.array(), d_token.array(), d_position.array()}; }
  std::int64_t entries() const { return row_offsets.back(); }
  std::int64_t capacity() const { return d_key.size(); }
  std::int64_t keys() const { return shape.n_layers * shape.n_features; }
};

Batch make_batch(const Shape& shape, Host& random) {
  Batch b;
  b.shape = shape;
  b.row_offsets.push_back(0);
  const std::int64_t crowded = shape.n_tokens / 2;  // a token where nearly everything fires
  std::vector<char> active(static_cast<std::size_t>(b.keys()));
  for (std::int64_t n = 0; n < shape.n_tokens; ++n) {
    std::fill(active.begin(), active.end(), 0);
    if (n % 7 != 3)  // every seventh row is empty
      for (std::int64_t s = 0; s < shape.n_layers; ++s) {
        char* row = active.data() + s * shape.n_features;
        for (std::int64_t j = 0; j < shape.k; ++j) row[random.below(shape.n_features)] = 1;
        // Features 3, 4 and the last one fire nearly always: hot, two of them side by side.
        for (const std::int64_t f : {std::int64_t{3}, std::int64_t{4}, shape.n_features - 1})
          if (f < shape.n_features && random.below(16) != 0) row[f] = 1;
        if (n == crowded)
          for (std::int64_t f = 0; f < shape.n_features; ++f) row[f] = random.below(8) != 0;
        row[shape.n_features / 2] = 0;  // never fires
      }
    for (std::int64_t i = 0; i < b.keys(); ++i)
      if (active[static_cast<std::size_t>(i)]) {
        b.key.push_back(static_cast<std::uint32_t>(i));
        b.value.push_back(static_cast<float>(0.1 + random.uniform()));
      }
    b.row_offsets.push_back(static_cast<std::int64_t>(b.key.size()));
  }
  b.offsets.assign(static_cast<std::size_t>(b.keys()) + 1, 0);
  for (const std::uint32_t k : b.key) ++b.offsets[k + 1];
  for (std::size_t k = 0; k < static_cast<std::size_t>(b.keys()); ++k) b.offsets[k + 1] += b.offsets[k];
  b.token.resize(b.key.size());
  b.position.resize(b.key.size());
  std::vector<std::int64_t> cursor(b.offsets.begin(), b.offsets.end() - 1);
  for (std::int64_t n = 0; n < shape.n_tokens; ++n)
    for (std::int64_t i = b.row_offsets[n]; i < b.row_offsets[n + 1]; ++i) {
      const std::int64_t at = cursor[b.key[i]]++;
      b.token[at] = static_cast<std::uint32_t>(n);
      b.position[at] = static_cast<std::uint32_t>(i);
    }
  b.d_rows = DeviceArray<std::int64_t>(b.row_offsets);
  b.d_offsets = DeviceArray<std::int64_t>(b.offsets);
  // Capacity beyond the entries: garbage there must not matter.
  const auto padded = [](auto host, auto garbage) {
    host.resize(host.size() + 57, garbage);
    return host;
  };
  b.d_key = DeviceArray<std::uint32_t>(padded(b.key, 0xfffffffeu));
  b.d_value = DeviceArray<float>(padded(b.value, std::nanf("")));
  b.d_token = DeviceArray<std::uint32_t>(padded(b.token, 0xfffffffeu));
  b.d_position = DeviceArray<std::uint32_t>(padded(b.position, 0xfffffffeu));
  return b;
}

/// A matrix on host (as fp32, after rounding to its type) and device.
struct HostMatrix {
  std::int64_t rows = 0, columns = 0;
  Scalar type = Scalar::fp32;
  std::vector<float> value;
  DeviceArray<std::byte> memory;
  AnyMatrix matrix() const { return {memory.data(), type, rows, columns, columns}; }
};
std::vector<std::byte> bytes_from(const std::vector<float>& value, Scalar type) {
  std::vector<std::byte> out(value.size() * static_cast<std::size_t>(bytes_of(type)));
  for (std::size_t i = 0; i < value.size(); ++i)
    if (type == Scalar::fp32) {
      std::memcpy(out.data() + 4 * i, &value[i], 4);
    } else {
      const std::uint16_t bits = to_bf16(value[i]).bits;
      std::memcpy(out.data() + 2 * i, &bits, 2);
    }
  return out;
}
std::vector<float> floats_from(const std::vector<std::byte>& bytes, Scalar type) {
  std::vector<float> out(bytes.size() / static_cast<std::size_t>(bytes_of(type)));
  for (std::size_t i = 0; i < out.size(); ++i)
    if (type == Scalar::fp32) {
      std::memcpy(&out[i], bytes.data() + 4 * i, 4);
    } else {
      bf16 h;
      std::memcpy(&h.bits, bytes.data() + 2 * i, 2);
      out[i] = h;
    }
  return out;
}
HostMatrix make_matrix(std::int64_t rows, std::int64_t columns, Scalar type, double deviation, Host& random) {
  HostMatrix m{rows, columns, type, std::vector<float>(static_cast<std::size_t>(rows * columns)),
               DeviceArray<std::byte>(0)};
  for (float& v : m.value) {
    v = random.normal(deviation);
    if (type == Scalar::bf16) v = to_bf16(v);
  }
  m.memory = DeviceArray<std::byte>(bytes_from(m.value, type));
  return m;
}

/// A parameter matrix with its state, decoded on the host.
struct Parameters {
  ParameterRows shape;
  std::vector<std::uint16_t> high;
  std::vector<std::int16_t> rest;
  std::vector<std::uint8_t> first, second;  // raw bytes of the moments
  std::vector<float> first_scale, second_scale;
  DeviceArray<std::uint16_t> d_high;
  DeviceArray<std::int16_t> d_rest;
  DeviceArray<std::uint8_t> d_first, d_second;
  DeviceArray<float> d_first_scale, d_second_scale;

  std::int64_t count() const { return shape.rows * shape.columns; }
  void upload() {
    d_high.upload(high), d_rest.upload(rest), d_first.upload(first), d_second.upload(second);
    d_first_scale.upload(first_scale), d_second_scale.upload(second_scale);
  }
  void download() {
    high = d_high.download(), rest = d_rest.download(), first = d_first.download(), second = d_second.download();
    first_scale = d_first_scale.download(), second_scale = d_second_scale.download();
  }
  ParameterRows view() const {
    ParameterRows p = shape;
    p.weight = d_high.data();
    p.weight_rest = d_rest.data();
    p.first_moment = d_first.data();
    p.second_moment = d_second.data();
    p.first_scale = d_first_scale.data();
    p.second_scale = d_second_scale.data();
    return p;
  }
  std::int64_t block(std::int64_t i) const {
    const std::int64_t row = i / shape.columns, column = i % shape.columns;
    return row * shape.blocks_per_row() + column / shape.segment * shape.blocks_per_segment() +
           column % shape.segment / kBlockColumns;
  }
  float seen_weight(std::int64_t i) const { return bf16{high[i]}; }
  float weight(std::int64_t i) const {
    if (shape.policy != StatePolicy::fp32) return seen_weight(i);
    return bits_float((static_cast<std::uint32_t>(high[i]) << 16) +
                      static_cast<std::uint32_t>(static_cast<std::int32_t>(rest[i])));
  }
  float moment(const std::vector<std::uint8_t>& raw, const std::vector<float>& scale, std::int64_t i) const {
    if (shape.policy == StatePolicy::fp32) {
      float value;
      std::memcpy(&value, raw.data() + 4 * i, 4);
      return value;
    }
    if (shape.policy == StatePolicy::bf16) {
      bf16 value;
      std::memcpy(&value.bits, raw.data() + 2 * i, 2);
      return value;
    }
    return code_to_float(raw[i]) * scale[block(i)];
  }
  float first_moment(std::int64_t i) const { return moment(first, first_scale, i); }
  float second_moment(std::int64_t i) const {  // v itself
    const float value = moment(second, second_scale, i);
    return shape.policy == StatePolicy::eight_bit ? value * value : value;
  }
};

Parameters make_parameters(StatePolicy policy, std::int64_t rows, std::int64_t columns, std::int64_t segment,
                           std::uint64_t element_base, Host& random) {
  Parameters p;
  p.shape.policy = policy;
  p.shape.rows = rows;
  p.shape.columns = columns;
  p.shape.segment = segment;
  p.shape.first_row = 5;
  p.shape.element_base = element_base;
  const std::size_t n = static_cast<std::size_t>(rows * columns);
  p.high.resize(n);
  const std::size_t width = policy == StatePolicy::fp32 ? 4 : policy == StatePolicy::bf16 ? 2 : 1;
  p.first.resize(n * width), p.second.resize(n * width);
  if (policy == StatePolicy::fp32) p.rest.resize(n);
  if (policy == StatePolicy::eight_bit) {
    const std::size_t blocks = static_cast<std::size_t>(rows * p.shape.blocks_per_row());
    p.first_scale.resize(blocks), p.second_scale.resize(blocks);
    for (std::size_t b = 0; b < blocks; ++b) {
      const bool dead = b % 11 == 0;  // blocks that never had a gradient
      p.first_scale[b] = dead ? 0.0f : static_cast<float>(1e-6 * (1 + random.uniform()));
      p.second_scale[b] = dead ? 0.0f : static_cast<float>(1e-6 * (1 + random.uniform()));
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    const float w = random.normal(0.05), m = random.normal(1e-4), v = static_cast<float>(1e-8 * random.uniform());
    if (policy == StatePolicy::fp32) {
      p.high[i] = static_cast<std::uint16_t>((float_bits(w) + 0x8000u) >> 16);
      p.rest[i] = static_cast<std::int16_t>(float_bits(w) & 0xffffu);
      std::memcpy(p.first.data() + 4 * i, &m, 4);
      std::memcpy(p.second.data() + 4 * i, &v, 4);
    } else {
      p.high[i] = to_bf16(w).bits;
      if (policy == StatePolicy::bf16) {
        const bf16 a = to_bf16(m), b = to_bf16(v);
        std::memcpy(p.first.data() + 2 * i, &a.bits, 2);
        std::memcpy(p.second.data() + 2 * i, &b.bits, 2);
      } else if (p.first_scale[static_cast<std::size_t>(p.block(static_cast<std::int64_t>(i)))] > 0) {
        const std::uint32_t a = static_cast<std::uint32_t>(random.engine());
        p.first[i] = static_cast<std::uint8_t>((a & 0xffu) % 0x7fu | (a & 0x80u));
        p.second[i] = static_cast<std::uint8_t>((a >> 8) % 0x7fu);
      }
    }
  }
  p.d_high = DeviceArray<std::uint16_t>(static_cast<std::int64_t>(p.high.size()));
  p.d_rest = DeviceArray<std::int16_t>(static_cast<std::int64_t>(p.rest.size()));
  p.d_first = DeviceArray<std::uint8_t>(static_cast<std::int64_t>(p.first.size()));
  p.d_second = DeviceArray<std::uint8_t>(static_cast<std::int64_t>(p.second.size()));
  p.d_first_scale = DeviceArray<float>(static_cast<std::int64_t>(p.first_scale.size()));
  p.d_second_scale = DeviceArray<float>(static_cast<std::int64_t>(p.second_scale.size()));
  p.upload();
  return p;
}

/// What must hold after a step from `before` with fp64 gradients: values within rounding, codes and roundings those of
/// the shared codec for the same random bits.
void check_step(const Parameters& before, const Parameters& after, const std::vector<double>& gradient,
                const std::vector<double>& absolute, const AdamStep& step) {
  const StatePolicy policy = before.shape.policy;
  const std::int64_t n = before.count();
  double worst_weight = 0, worst_first = 0, worst_second = 0;
  std::int64_t other_weight = 0, other_first = 0, other_second = 0;
  std::vector<float> largest_first(before.first_scale.size()), largest_root(before.first_scale.size());
  std::vector<double> m(static_cast<std::size_t>(n)), v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const double g = step.gradient_scale * gradient[i];
    m[i] = step.beta1 * static_cast<double>(before.first_moment(i)) + static_cast<double>(step.first_gain) * g;
    v[i] = step.beta2 * static_cast<double>(before.second_moment(i)) + static_cast<double>(step.second_gain) * g * g;
    if (policy == StatePolicy::eight_bit) {
      float& a = largest_first[before.block(i)];
      float& b = largest_root[before.block(i)];
      a = std::max(a, static_cast<float>(std::fabs(m[i])));
      b = std::max(b, static_cast<float>(std::sqrt(v[i])));
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const double w0 = before.weight(i);
    const double w = w0 - step.learning_rate * (m[i] * step.first_correction /
                                                    (std::sqrt(v[i] * step.second_correction) + step.epsilon) +
                                                step.weight_decay * w0);
    // Errors: of the gradient's sum (hits * 2^-24 of its absolute sum), of a dozen fp32 operations, of the approximate
    // root and reciprocal (2^-22 each).
    const double dg = step.gradient_scale * absolute[i];
    const double scale_first = std::fabs(m[i]) + static_cast<double>(step.first_gain) * dg +
                               std::fabs(step.beta1 * before.first_moment(i)) + 1e-30;
    const double scale_second = v[i] + static_cast<double>(step.second_gain) * dg * dg + 1e-30;
    const double update = step.learning_rate * step.first_correction * scale_first /
                          (std::sqrt(v[i] * step.second_correction) + step.epsilon);
    const std::uint64_t element = before.shape.global_element(i / before.shape.columns, i % before.shape.columns);
    const int part = static_cast<int>(element % kElementsPerRandom);
    const Random4 bits = philox(step.seed, Purpose::weight_rounding, step.step, element / kElementsPerRandom);
    if (policy == StatePolicy::fp32) {
      worst_weight = std::max(worst_weight, std::fabs(after.weight(i) - w) / (std::fabs(w0) + update));
      worst_first = std::max(worst_first, std::fabs(after.first_moment(i) - m[i]) / scale_first);
      worst_second = std::max(worst_second, std::fabs(after.second_moment(i) - v[i]) / scale_second);
      continue;
    }
    const bf16 rounded = to_bf16_stochastic(static_cast<float>(w), rounding_bits(bits, part));
    other_weight += rounded.bits != after.high[i];
    worst_weight = std::max(worst_weight, std::fabs(after.weight(i) - w) / (std::fabs(w) + update));
    if (policy == StatePolicy::bf16) {
      const bf16 a = to_bf16_stochastic(static_cast<float>(m[i]), rounding_bits(bits, part ^ kFirstMomentPart));
      const bf16 b = to_bf16_stochastic(static_cast<float>(v[i]), rounding_bits(bits, part ^ kSecondMomentPart));
      other_first += static_cast<float>(a) != after.first_moment(i);
      other_second += static_cast<float>(b) != after.second_moment(i);
    } else {
      const float first_scale = block_scale(largest_first[before.block(i)]),
                  second_scale = block_scale(largest_root[before.block(i)]);
      const std::uint8_t a = code_nearest(static_cast<float>(m[i]) * inverse_scale(first_scale));
      const std::uint8_t b = code_stochastic_positive(static_cast<float>(std::sqrt(v[i])) * inverse_scale(second_scale),
                                                      rounding_bits(bits, part ^ kSecondMomentPart));
      other_first += a != after.first[i];
      other_second += b != after.second[i];
      worst_first =
          std::max(worst_first, std::fabs(after.first_scale[before.block(i)] - static_cast<double>(first_scale)) /
                                    (first_scale + 1e-30));
      worst_second =
          std::max(worst_second, std::fabs(after.second_scale[before.block(i)] - static_cast<double>(second_scale)) /
                                     (second_scale + 1e-30));
    }
  }
  if (policy == StatePolicy::fp32) {
    // Sums of up to some thousand hits lose at most sqrt-like amounts of 2^-24 in practice, hits * 2^-24 at worst.
    CHECK(worst_weight <= 2e-5);
    CHECK(worst_first <= 1e-5);
    CHECK(worst_second <= 2e-5);
  } else {
    CHECK(worst_weight <= 0x1p-7 + 1e-4);  // one bf16 spacing
    // A result within 1e-6 of a rounding border may fall on the other side: spacing 2^-8 (bf16), 2^-4 (codes).
    CHECK(static_cast<double>(other_weight) <= 0.003 * static_cast<double>(n) + 3);
    CHECK(static_cast<double>(other_first) <= 0.003 * static_cast<double>(n) + 3);
    CHECK(static_cast<double>(other_second) <= 0.003 * static_cast<double>(n) + 3);
    if (policy == StatePolicy::eight_bit) {
      CHECK(worst_first <= 1e-5);
      CHECK(worst_second <= 1e-5);
    }
  }
}

AdamStep make_step(double scale) {
  AdamStep step{};
  step.learning_rate = 1e-3f;
  step.beta1 = 0.9f;
  step.beta2 = 0.999f;
  step.first_gain = 0.1f;
  step.second_gain = 0.001f;
  step.epsilon = 1e-8f;
  step.weight_decay = 0.01f;
  step.first_correction = 1.0f / (1.0f - std::pow(0.9f, 7.0f));
  step.second_correction = 1.0f / (1.0f - std::pow(0.999f, 7.0f));
  step.gradient_scale = static_cast<float>(scale);
  step.seed = 1234567;
  step.step = 7;
  return step;
}

/// dW of a layer in fp64 and the sum of its terms' magnitudes (times the number of terms' roundoff, relative to fp32).
struct Gradient {
  std::vector<double> sum, absolute;
};
Gradient gradient_of(const Batch& b, const HostMatrix& rows, const std::vector<float>& value, std::int64_t layer,
                     std::int64_t first_column, std::int64_t columns) {
  Gradient g{std::vector<double>(static_cast<std::size_t>(b.shape.n_features * columns)), {}};
  g.absolute.resize(g.sum.size());
  for (std::int64_t f = 0; f < b.shape.n_features; ++f) {
    const std::int64_t key = layer * b.shape.n_features + f;
    for (std::int64_t h = b.offsets[key]; h < b.offsets[key + 1]; ++h) {
      const double a = value[b.position[h]];
      const float* row = rows.value.data() + b.token[h] * rows.columns + first_column;
      for (std::int64_t c = 0; c < columns; ++c) {
        g.sum[f * columns + c] += a * row[c];
        g.absolute[f * columns + c] += std::fabs(a * row[c]);
      }
    }
  }
  return g;
}

double largest(const std::vector<double>& v) {
  double most = 0;
  for (const double x : v) most = std::max(most, std::fabs(x));
  return most;
}

void check_norms(const std::vector<double>& norm, const std::vector<double>& expected) {
  const double most = largest(expected);
  double worst = 0;
  for (std::size_t i = 0; i < norm.size(); ++i)
    worst = std::max(worst, std::fabs(norm[i] - expected[i]) / (expected[i] + 1e-6 * most + 1e-300));
  CHECK(worst <= 1e-4);  // fp32 sums of squares of up to 2304 columns
}

std::vector<std::vector<std::uint8_t>> state_bytes(const std::vector<Parameters>& all) {
  std::vector<std::vector<std::uint8_t>> out;
  for (const Parameters& p : all) {
    const auto add = [&](const auto& device) {
      const auto host = device.download();
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(host.data());
      out.emplace_back(bytes, bytes + host.size() * sizeof host[0]);
    };
    add(p.d_high), add(p.d_rest), add(p.d_first), add(p.d_second), add(p.d_first_scale), add(p.d_second_scale);
  }
  return out;
}

TEST_CASE("transpose gives every feature its hits in token order") {
  Host random;
  for (const Shape& shape : shapes) {
    CAPTURE(name_of(shape));
    Batch b = make_batch(shape, random);
    b.d_offsets.poison(), b.d_token.poison(), b.d_position.poison();
    DeviceArray<std::byte> workspace(transpose_workspace(Backend::cuda, b.keys(), b.capacity()));
    transpose(gpu, b.activations(), b.hits(), workspace.array());
    CHECK(b.d_offsets.download() == b.offsets);
    auto token = b.d_token.download(), position = b.d_position.download();
    token.resize(b.token.size()), position.resize(b.position.size());
    CHECK(token == b.token);
    CHECK(position == b.position);
  }
}

TEST_CASE("restrict_features joins groups of tokens and keeps a range of features in order") {
  Host random;
  for (const Shape& shape : shapes)
    for (const std::int64_t slices : {1, 2, 3}) {
      CAPTURE(name_of(shape));
      CAPTURE(slices);
      const Batch b = make_batch(shape, random);
      // The tokens in three groups; a group's offsets begin at 0, as its rank made them.
      std::vector<DeviceArray<std::int64_t>> offsets;
      std::vector<SparseActivations> groups;
      for (std::int64_t g = 0; g < 3; ++g) {
        const std::int64_t begin = g * shape.n_tokens / 3, end = (g + 1) * shape.n_tokens / 3;
        const std::int64_t first = b.row_offsets[begin], count = b.row_offsets[end] - first;
        std::vector<std::int64_t> own;
        for (std::int64_t n = begin; n <= end; ++n) own.push_back(b.row_offsets[n] - first);
        offsets.emplace_back(own);
        groups.push_back({end - begin,
                          shape.n_layers,
                          shape.n_features,
                          offsets.back().array(),
                          {b.d_key.data() + first, count},
                          {b.d_value.data() + first, count}});
      }
      for (std::int64_t slice = 0; slice < slices; ++slice) {
        const std::int64_t from = slice * shape.n_features / slices, to = (slice + 1) * shape.n_features / slices;
        std::vector<std::int64_t> expected_offsets{0};
        std::vector<std::uint32_t> expected_key;
        std::vector<float> expected_value;
        for (std::int64_t n = 0; n < shape.n_tokens; ++n) {
          for (std::int64_t i = b.row_offsets[n]; i < b.row_offsets[n + 1]; ++i) {
            const std::int64_t layer = b.key[i] / shape.n_features, feature = b.key[i] % shape.n_features;
            if (feature < from || feature >= to) continue;
            expected_key.push_back(static_cast<std::uint32_t>(layer * (to - from) + feature - from));
            expected_value.push_back(b.value[i]);
          }
          expected_offsets.push_back(static_cast<std::int64_t>(expected_key.size()));
        }
        DeviceArray<std::int64_t> row_offsets(shape.n_tokens + 1);
        DeviceArray<std::uint32_t> key(b.capacity());
        DeviceArray<float> value(b.capacity());
        row_offsets.poison(), key.poison(), value.poison();
        restrict_features(gpu, groups, from,
                          {shape.n_tokens, shape.n_layers, to - from, row_offsets.array(), key.array(), value.array()});
        CHECK(row_offsets.download() == expected_offsets);
        auto got_key = key.download();
        auto got_value = value.download();
        got_key.resize(expected_key.size()), got_value.resize(expected_value.size());
        CHECK(got_key == expected_key);
        CHECK(got_value == expected_value);
      }
    }
}

TEST_CASE("decode_forward is the plain sum, whatever the shape") {
  Host random;
  for (const Shape& shape : shapes)
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      CAPTURE(name_of(shape));
      const Batch b = make_batch(shape, random);
      const std::int64_t L = shape.n_layers, d = shape.d_model;
      std::vector<Parameters> decoder;
      std::vector<ParameterRows> views;
      for (std::int64_t s = 0; s < L; ++s)
        decoder.push_back(make_parameters(type == Scalar::fp32 ? StatePolicy::fp32 : StatePolicy::bf16,
                                          shape.n_features, (L - s) * d, d, 0, random));
      for (const Parameters& p : decoder) views.push_back(p.view());
      const std::int64_t begin = shape.n_tokens / 3, count = shape.n_tokens - begin;
      DeviceArray<std::byte> y(count * L * d * bytes_of(type));
      y.poison();
      decode_forward(gpu, b.activations(), begin, count, views, 0, {y.data(), type, count, L * d, L * d});
      const std::vector<float> got = floats_from(y.download(), type);
      // A range of target layers is the same columns, bit for bit.
      for (std::int64_t target = 0; target < L; ++target) {
        const std::int64_t columns = std::min<std::int64_t>(2, L - target) * d;
        DeviceArray<std::byte> some(count * columns * bytes_of(type));
        some.poison();
        decode_forward(gpu, b.activations(), begin, count, views, target, {some.data(), type, count, columns, columns});
        const std::vector<float> part = floats_from(some.download(), type);
        bool same = true;
        for (std::int64_t n = 0; n < count; ++n)
          same = same && std::equal(part.begin() + n * columns, part.begin() + (n + 1) * columns,
                                    got.begin() + n * L * d + target * d);
        CHECK(same);
      }
      double worst = 0;
      std::vector<double> sum(static_cast<std::size_t>(L * d)), absolute(sum.size());
      for (std::int64_t n = 0; n < count; ++n) {
        std::fill(sum.begin(), sum.end(), 0.0), std::fill(absolute.begin(), absolute.end(), 0.0);
        for (std::int64_t i = b.row_offsets[begin + n]; i < b.row_offsets[begin + n + 1]; ++i) {
          const std::int64_t s = b.key[i] / shape.n_features, f = b.key[i] % shape.n_features;
          for (std::int64_t c = 0; c < (L - s) * d; ++c) {
            const double term = static_cast<double>(b.value[i]) * decoder[s].seen_weight(f * (L - s) * d + c);
            sum[s * d + c] += term;
            absolute[s * d + c] += std::fabs(term);
          }
        }
        const double entries = static_cast<double>(b.row_offsets[begin + n + 1] - b.row_offsets[begin + n]);
        for (std::int64_t c = 0; c < L * d; ++c) {
          // k products summed in fp32, then rounded to the type of y.
          const double allowed =
              entries * kUnit * absolute[c] + (type == Scalar::bf16 ? 0x1p-8 * std::fabs(sum[c]) : 0.0) + 1e-38;
          worst = std::max(worst, std::fabs(got[n * L * d + c] - sum[c]) / allowed);
        }
      }
      CHECK(worst <= 1.01);
    }
}

TEST_CASE("decode_backward_update: activation gradients, Adam in place, norms; the same bits twice") {
  Host random;
  for (const Shape& shape : shapes)
    for (const StatePolicy policy : {StatePolicy::fp32, StatePolicy::bf16, StatePolicy::eight_bit})
      for (const Scalar type : {Scalar::bf16, Scalar::fp32}) {
        if (type == Scalar::fp32 && shape.n_tokens > 1000) continue;  // the slow path has been seen at smaller sizes
        CAPTURE(name_of(shape));
        CAPTURE(static_cast<int>(policy));
        CAPTURE(static_cast<int>(type));
        const Batch b = make_batch(shape, random);
        const std::int64_t L = shape.n_layers, d = shape.d_model, F = shape.n_features;
        const HostMatrix rows = make_matrix(shape.n_tokens, L * d, type, 1e-3, random);
        const AdamStep step = make_step(0.7);
        const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{step});
        std::vector<Parameters> decoder;
        std::vector<ParameterRows> views;
        for (std::int64_t s = 0; s < L; ++s)
          decoder.push_back(make_parameters(policy, F, (L - s) * d, d, 1024u * static_cast<std::uint64_t>(s), random));
        for (const Parameters& p : decoder) views.push_back(p.view());
        DeviceArray<float> da(b.capacity());
        DeviceArray<double> norm(b.keys());
        DeviceArray<std::byte> workspace(decode_backward_workspace(Backend::cuda, L, F, d, b.capacity()));
        workspace.poison();
        da.poison(), norm.poison();

        // The norm-only pass first: it must leave the parameters alone.
        const auto before = state_bytes(decoder);
        decode_backward_norm(gpu, b.activations(), b.hits(), rows.matrix(), views, da.array(), norm.array(),
                             workspace.array());
        CHECK(state_bytes(decoder) == before);
        const auto norm_only = norm.download();
        const auto da_only = da.download();
        da.poison(), norm.poison();

        decode_backward_update(gpu, b.activations(), b.hits(), rows.matrix(), views, d_step.data(), da.array(),
                               norm.array(), workspace.array());
        const auto after = state_bytes(decoder);
        const auto da_got = da.download();
        const auto norm_got = norm.download();
        CHECK(std::memcmp(da_got.data(), da_only.data(), static_cast<std::size_t>(b.entries()) * 4) == 0);

        std::vector<double> norm_expected(static_cast<std::size_t>(b.keys()));
        double worst_da = 0;
        for (std::int64_t s = 0; s < L; ++s) {
          const Gradient g = gradient_of(b, rows, b.value, s, s * d, (L - s) * d);
          const std::int64_t columns = (L - s) * d;
          for (std::int64_t f = 0; f < F; ++f) {
            const std::int64_t key = s * F + f;
            for (std::int64_t c = 0; c < columns; ++c)
              norm_expected[key] += g.sum[f * columns + c] * g.sum[f * columns + c];
            for (std::int64_t h = b.offsets[key]; h < b.offsets[key + 1]; ++h) {
              double dot = 0, absolute = 0;
              for (std::int64_t c = 0; c < columns; ++c) {
                const double term = static_cast<double>(decoder[s].seen_weight(f * columns + c)) *
                                    rows.value[b.token[h] * L * d + s * d + c];
                dot += term, absolute += std::fabs(term);
              }
              // Lanes sum a 32nd of the columns each, then a tree: far fewer roundings in a row than columns.
              worst_da = std::max(worst_da, std::fabs(da_got[b.position[h]] - dot) / (64 * kUnit * absolute + 1e-38));
            }
          }
          Parameters now = make_parameters(policy, F, columns, d, decoder[s].shape.element_base, random);
          now.d_high = std::move(decoder[s].d_high), now.d_rest = std::move(decoder[s].d_rest);
          now.d_first = std::move(decoder[s].d_first), now.d_second = std::move(decoder[s].d_second);
          now.d_first_scale = std::move(decoder[s].d_first_scale),
          now.d_second_scale = std::move(decoder[s].d_second_scale);
          now.download();
          check_step(decoder[s], now, g.sum, g.absolute, step);
          decoder[s].d_high = std::move(now.d_high), decoder[s].d_rest = std::move(now.d_rest);
          decoder[s].d_first = std::move(now.d_first), decoder[s].d_second = std::move(now.d_second);
          decoder[s].d_first_scale = std::move(now.d_first_scale),
          decoder[s].d_second_scale = std::move(now.d_second_scale);
        }
        CHECK(worst_da <= 1.0);
        check_norms(norm_only, norm_expected);
        for (double& x : norm_expected) x *= static_cast<double>(step.gradient_scale) * step.gradient_scale;
        check_norms(norm_got, norm_expected);

        // Again, while the rows of the first targets come late: before that there is something else.
        for (Parameters& p : decoder) p.upload();
        workspace.poison(0x5a);
        const AnyMatrix all = rows.matrix();
        const std::int64_t element = bytes_of(type), pitch = all.stride * element, late_columns = L / 2 * d;
        DeviceArray<std::byte> arriving(all.rows * pitch);
        const auto copy = [&](std::int64_t first, std::int64_t columns) {
          if (all.rows > 0 && columns > 0)
            check_cuda(cudaMemcpy2DAsync(arriving.data() + first * element, static_cast<std::size_t>(pitch),
                                         static_cast<const std::byte*>(all.data) + first * element,
                                         static_cast<std::size_t>(pitch), static_cast<std::size_t>(columns * element),
                                         static_cast<std::size_t>(all.rows), cudaMemcpyDeviceToDevice,
                                         static_cast<cudaStream_t>(gpu.stream)),
                       "copy");
        };
        arriving.poison();
        copy(late_columns, L * d - late_columns);
        decode_backward_update(gpu, b.activations(), b.hits(),
                               {arriving.data(), type, all.rows, all.columns, all.stride}, views, d_step.data(),
                               da.array(), {}, workspace.array(), {L / 2, [&] { copy(0, late_columns); }});
        CHECK(state_bytes(decoder) == after);
        const auto da_again = da.download();
        CHECK(std::memcmp(da_got.data(), da_again.data(), static_cast<std::size_t>(b.entries()) * 4) == 0);
      }
}

TEST_CASE("encode_backward_update: rows, biases, norms; the same bits twice") {
  Host random;
  for (const Shape& shape : shapes)
    for (const StatePolicy policy : {StatePolicy::fp32, StatePolicy::bf16, StatePolicy::eight_bit}) {
      CAPTURE(name_of(shape));
      CAPTURE(static_cast<int>(policy));
      const Batch b = make_batch(shape, random);
      const std::int64_t L = shape.n_layers, d = shape.d_model, F = shape.n_features;
      const HostMatrix x =
          make_matrix(shape.n_tokens, L * d, shape.n_tokens == 37 ? Scalar::fp32 : Scalar::bf16, 1.0, random);
      const AdamStep step = make_step(0.7);
      const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{step});
      std::vector<float> dz(static_cast<std::size_t>(b.capacity()));
      for (float& v : dz) v = random.normal(1e-3);
      const DeviceArray<float> d_dz(dz);
      std::vector<Parameters> encoder;
      std::vector<ParameterRows> views;
      std::vector<DeviceArray<float>> bias_memory;
      std::vector<ParameterVector> biases;
      std::vector<std::vector<float>> bias_before;
      for (std::int64_t s = 0; s < L; ++s) {
        encoder.push_back(make_parameters(policy, F, d, d, 1024u * static_cast<std::uint64_t>(s), random));
        for (int i = 0; i < 3; ++i) {
          std::vector<float> host(static_cast<std::size_t>(F));
          for (float& v : host)
            v = i == 2 ? static_cast<float>(1e-8 * random.uniform()) : random.normal(i == 0 ? 0.1 : 1e-4);
          bias_before.push_back(host);
          bias_memory.emplace_back(host);
        }
      }
      for (std::int64_t s = 0; s < L; ++s) {
        views.push_back(encoder[s].view());
        biases.push_back({bias_memory[3 * s].array(), bias_memory[3 * s + 1].array(), bias_memory[3 * s + 2].array()});
      }
      DeviceArray<double> norm(b.keys());
      DeviceArray<std::byte> workspace(encode_backward_workspace(Backend::cuda, L, F, d, b.capacity()));
      workspace.poison(), norm.poison();
      encode_backward_norm(gpu, b.activations(), b.hits(), x.matrix(), d_dz.array(), norm.array(), workspace.array());
      const auto norm_only = norm.download();
      norm.poison();
      encode_backward_update(gpu, b.activations(), b.hits(), x.matrix(), d_dz.array(), views, biases, d_step.data(),
                             norm.array(), workspace.array());
      const auto norm_got = norm.download();
      const auto after = state_bytes(encoder);
      std::vector<double> norm_expected(static_cast<std::size_t>(b.keys()));
      double worst_bias = 0;
      for (std::int64_t s = 0; s < L; ++s) {
        const Gradient g = gradient_of(b, x, dz, s, s * d, d);
        const auto bias_after = bias_memory[3 * s].download();
        for (std::int64_t f = 0; f < F; ++f) {
          const std::int64_t key = s * F + f;
          double sum = 0;
          for (std::int64_t h = b.offsets[key]; h < b.offsets[key + 1]; ++h) sum += dz[b.position[h]];
          for (std::int64_t c = 0; c < d; ++c) norm_expected[key] += g.sum[f * d + c] * g.sum[f * d + c];
          norm_expected[key] += sum * sum;
          float w = bias_before[3 * s][f], m = bias_before[3 * s + 1][f], v = bias_before[3 * s + 2][f];
          adam_rule(step, 0.0f, static_cast<float>(sum), w, m, v);
          worst_bias = std::max(worst_bias, std::fabs(static_cast<double>(bias_after[f]) - w));
        }
        Parameters now = make_parameters(policy, F, d, d, encoder[s].shape.element_base, random);
        std::swap(now.d_high, encoder[s].d_high), std::swap(now.d_rest, encoder[s].d_rest);
        std::swap(now.d_first, encoder[s].d_first), std::swap(now.d_second, encoder[s].d_second);
        std::swap(now.d_first_scale, encoder[s].d_first_scale),
            std::swap(now.d_second_scale, encoder[s].d_second_scale);
        now.download();
        check_step(encoder[s], now, g.sum, g.absolute, step);
        std::swap(now.d_high, encoder[s].d_high), std::swap(now.d_rest, encoder[s].d_rest);
        std::swap(now.d_first, encoder[s].d_first), std::swap(now.d_second, encoder[s].d_second);
        std::swap(now.d_first_scale, encoder[s].d_first_scale),
            std::swap(now.d_second_scale, encoder[s].d_second_scale);
      }
      CHECK(worst_bias <= 1e-7);  // a step moves a bias by at most about 1e-3 and it is below 1
      check_norms(norm_only, norm_expected);
      for (double& v : norm_expected) v *= static_cast<double>(step.gradient_scale) * step.gradient_scale;
      check_norms(norm_got, norm_expected);
      for (Parameters& p : encoder) p.upload();
      encode_backward_update(gpu, b.activations(), b.hits(), x.matrix(), d_dz.array(), views, biases, d_step.data(), {},
                             workspace.array());
      CHECK(state_bytes(encoder) == after);
    }
}

TEST_CASE("adam_rows, initialise_uniform, weights, norms, flags") {
  Host random;
  for (const std::int64_t d : {13, 384, 768, 770, 2304})
    for (const StatePolicy policy : {StatePolicy::fp32, StatePolicy::bf16, StatePolicy::eight_bit}) {
      CAPTURE(d);
      CAPTURE(static_cast<int>(policy));
      const std::int64_t rows = 37, columns = 3 * d;
      Parameters p = make_parameters(policy, rows, columns, d, 4096, random);
      const std::vector<Parameters> none;
      std::vector<float> g(static_cast<std::size_t>(rows * columns));
      for (float& v : g) v = random.normal(1e-3);
      const DeviceArray<float> d_g(g);
      const AdamStep step = make_step(0.5);
      const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{step});
      Parameters before = make_parameters(policy, rows, columns, d, 4096, random);
      before.high = p.high, before.rest = p.rest, before.first = p.first, before.second = p.second;
      before.first_scale = p.first_scale, before.second_scale = p.second_scale;

      DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
      flag_nonfinite(gpu, p.view(), flag.data());
      CHECK(flag.download()[0] == 0);
      adam_rows(gpu, p.view(), 0, {d_g.data(), rows, columns, columns}, d_step.data());
      p.download();
      check_step(before, p, {g.begin(), g.end()}, std::vector<double>(g.size()), step);

      DeviceArray<float> norms(rows * 3), wide(rows * columns);
      segment_norms(gpu, p.view(), {norms.data(), rows, 3, 3});
      weights_to_float(gpu, p.view(), 0, {wide.data(), rows, columns, columns});
      const auto got_norms = norms.download();
      const auto weights = wide.download();
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t t = 0; t < 3; ++t) {
          double sum = 0;
          for (std::int64_t c = 0; c < d; ++c) {
            const double w = p.weight(r * columns + t * d + c);
            sum += w * w;
            REQUIRE(weights[r * columns + t * d + c] == p.weight(r * columns + t * d + c));
          }
          REQUIRE(std::fabs(got_norms[r * 3 + t] - std::sqrt(sum)) <= 1e-6 * std::sqrt(sum));
        }
      const auto high = p.d_high.download();
      const auto rest = p.d_rest.download();
      weights_from_float(gpu, p.view(), 0, {wide.data(), rows, columns, columns});
      CHECK(p.d_high.download() == high);
      CHECK(p.d_rest.download() == rest);

      p.download();
      std::vector<float> moments;
      for (std::int64_t i = 0; i < p.count(); ++i)
        moments.push_back(p.first_moment(i)), moments.push_back(p.second_moment(i));
      initialise_uniform(gpu, p.view(), 0.1f, 99, Purpose::decoder_initial);
      p.download();
      bool same = true, untouched = true;
      for (std::int64_t i = 0; i < p.count(); ++i) {
        const std::uint64_t element = p.shape.global_element(i / columns, i % columns);
        const float w =
            0.1f *
            (2.0f * uniform_float(philox(99, Purpose::decoder_initial, 0, element / 4).word[element % 4]) - 1.0f);
        same = same && p.weight(i) == (policy == StatePolicy::fp32 ? w : static_cast<float>(to_bf16(w)));
        const std::size_t at = 2 * static_cast<std::size_t>(i);
        untouched = untouched && p.first_moment(i) == moments[at] && p.second_moment(i) == moments[at + 1];
      }
      CHECK(same);
      CHECK(untouched);

      // A gradient that is not finite must show in the state, whatever the policy.
      for (const float bad : {INFINITY, std::nanf("")}) {
        g[static_cast<std::size_t>(5 * columns + 4)] = bad;
        const DeviceArray<float> d_bad(g);
        flag.upload({0});
        initialise_uniform(gpu, p.view(), 0.1f, 99, Purpose::decoder_initial);
        adam_rows(gpu, p.view(), 0, {d_bad.data(), rows, columns, columns}, d_step.data());
        flag_nonfinite(gpu, p.view(), flag.data());
        CHECK(flag.download()[0] == 1);
      }
    }
}

TEST_CASE("a learning rate of zero changes no weight") {
  Host random;
  for (const StatePolicy policy : {StatePolicy::fp32, StatePolicy::bf16, StatePolicy::eight_bit}) {
    Parameters p = make_parameters(policy, 16, 768, 768, 0, random);
    AdamStep step = make_step(1.0);
    step.learning_rate = 0.0f;
    const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{step});
    std::vector<float> g(16 * 768, 0.5f);
    const DeviceArray<float> d_g(g);
    const auto before = p.high;
    adam_rows(gpu, p.view(), 0, {d_g.data(), 16, 768, 768}, d_step.data());
    p.download();
    CHECK(p.high == before);
  }
}

TEST_CASE("residual_and_loss, column_sums, normalise_rows") {
  Host random;
  for (const Shape& shape : shapes)
    for (const Scalar type : {Scalar::bf16, Scalar::fp32}) {
      CAPTURE(name_of(shape));
      const std::int64_t N = shape.n_tokens, L = shape.n_layers, d = shape.d_model, parts = 3, C = L * d;
      const HostMatrix partial = make_matrix(parts * N, C, type, 0.5, random),
                       target = make_matrix(N, C, type, 1.0, random);
      const HostMatrix vectors = make_matrix(3, C, Scalar::fp32, 1.0, random);
      const float* v = vectors.value.data();
      const DeviceArray<float> bias(std::vector<float>(v, v + C)), centre(std::vector<float>(v + C, v + 2 * C)),
          scale(std::vector<float>(v + 2 * C, v + 3 * C));
      DeviceArray<std::byte> rows(N * C * bytes_of(type)), workspace((N + 7) / 8 * L * 3 * 8);
      DeviceArray<double> sums(3 * L);
      const LossSums loss{{sums.data(), L}, {sums.data() + L, L}, {sums.data() + 2 * L, L}};
      const float factor = 0.25f;
      std::vector<double> first;
      for (int run = 0; run < 2; ++run) {
        rows.poison(), sums.poison(), workspace.poison();
        residual_and_loss(gpu, partial.matrix(), parts, target.matrix(), bias.array(), centre.array(), scale.array(), L,
                          factor, {rows.data(), type, N, C, C}, loss, workspace.array());
        if (run == 0) first = sums.download();
      }
      const auto got = sums.download();
      CHECK(std::memcmp(got.data(), first.data(), got.size() * 8) == 0);
      const auto g = floats_from(rows.download(), type);
      std::vector<double> expected(static_cast<std::size_t>(3 * L)), column(static_cast<std::size_t>(C)),
          absolute(column.size());
      double worst = 0;
      for (std::int64_t n = 0; n < N; ++n)
        for (std::int64_t c = 0; c < C; ++c) {
          double e = v[c] - static_cast<double>(target.value[n * C + c]);
          for (std::int64_t p = 0; p < parts; ++p) e += partial.value[(p * N + n) * C + c];
          const double t = (static_cast<double>(target.value[n * C + c]) - v[C + c]) * v[2 * C + c];
          expected[c / d] += e * e;
          expected[L + c / d] += e * e * v[2 * C + c] * v[2 * C + c];
          expected[2 * L + c / d] += t * t;
          // Five fp32 additions of numbers of size about 1, then rounding to the type.
          worst = std::max(worst, std::fabs(g[n * C + c] - factor * e) /
                                      (factor * (1e-6 + (type == Scalar::bf16 ? 0x1p-8 : 0.0) * std::fabs(e))));
          column[c] += g[n * C + c], absolute[c] += std::fabs(g[n * C + c]);
        }
      CHECK(worst <= 1.0);
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::fabs(got[i] - expected[i]) <= 1e-6 * expected[i]);
      DeviceArray<float> out(C);
      out.poison();
      column_sums(gpu, {rows.data(), type, N, C, C}, out.array());
      const auto sum = out.download();
      worst = 0;
      for (std::int64_t c = 0; c < C; ++c)
        worst = std::max(
            worst, std::fabs(sum[c] - column[c]) / (static_cast<double>(N / 32 + 33) * kUnit * absolute[c] + 1e-30));
      CHECK(worst <= 1.0);

      DeviceArray<std::int32_t> flag(std::vector<std::int32_t>{0});
      DeviceArray<std::byte> normal(N * C * 4);
      normal.poison();
      normalise_rows(gpu, target.matrix(), centre.array(), scale.array(), {normal.data(), Scalar::fp32, N, C, C},
                     flag.data());
      const auto z = floats_from(normal.download(), Scalar::fp32);
      worst = 0;
      for (std::int64_t i = 0; i < N * C; ++i)
        worst =
            std::max(worst, static_cast<double>(std::fabs(z[i] - (target.value[i] - v[C + i % C]) * v[2 * C + i % C])));
      CHECK(worst == 0.0);
      CHECK(flag.download()[0] == 0);
      const float bad = INFINITY;
      const std::uint16_t bad16 = to_bf16(bad).bits;
      if (type == Scalar::fp32)
        check_cuda(cudaMemcpy(target.memory.data() + 4 * (N * C - 1), &bad, 4, cudaMemcpyHostToDevice), "bad");
      else
        check_cuda(cudaMemcpy(target.memory.data() + 2 * (N * C - 1), &bad16, 2, cudaMemcpyHostToDevice), "bad");
      normalise_rows(gpu, target.matrix(), centre.array(), scale.array(), {normal.data(), Scalar::bf16, N, C, C},
                     flag.data());
      CHECK(flag.download()[0] == 1);
    }
}

TEST_CASE("evaluation sums, firing and clocks") {
  Host random;
  for (const Shape& shape : {all_shapes[1], all_shapes[2], all_shapes[4]}) {
    const Batch b = make_batch(shape, random);
    const std::int64_t N = shape.n_tokens, C = shape.n_layers * shape.d_model;
    const HostMatrix y = make_matrix(N, C, Scalar::fp32, 1.0, random), r = make_matrix(N, C, Scalar::bf16, 1.0, random),
                     vectors = make_matrix(3, C, Scalar::fp32, 1.0, random);
    const float* v = vectors.value.data();
    const DeviceArray<float> mean(std::vector<float>(v, v + C)), spread(std::vector<float>(v + C, v + 2 * C)),
        pivot(std::vector<float>(v + 2 * C, v + 3 * C));
    DeviceArray<double> sums(std::vector<double>(static_cast<std::size_t>(4 * C), 1.0));
    accumulate_dimensions(gpu, y.matrix(), r.matrix(), mean.array(), spread.array(), pivot.array(),
                          {{sums.data(), C}, {sums.data() + C, C}, {sums.data() + 2 * C, C}, {sums.data() + 3 * C, C}});
    const auto got = sums.download();
    std::vector<double> expected(static_cast<std::size_t>(4 * C), 1.0);
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t c = 0; c < C; ++c) {
        const double value = y.value[n * C + c],
                     e = value - (static_cast<double>(r.value[n * C + c]) * v[C + c] + v[c]), t = value - v[2 * C + c];
        expected[c] += e, expected[C + c] += e * e, expected[2 * C + c] += t, expected[3 * C + c] += t * t;
      }
    for (std::size_t i = 0; i < expected.size(); ++i)
      REQUIRE(std::fabs(got[i] - expected[i]) <= 1e-10 * (std::fabs(expected[i]) + static_cast<double>(N)));
    DeviceArray<std::int64_t> fired(std::vector<std::int64_t>(static_cast<std::size_t>(b.keys()), 2)),
        since(std::vector<std::int64_t>(static_cast<std::size_t>(b.keys()), 5));
    const DeviceArray<AdamStep> d_step(std::vector<AdamStep>{AdamStep{}});
    accumulate_firing(gpu, b.hits(), fired.array());
    advance_clocks(gpu, b.hits(), 100, d_step.data(), since.array());
    const auto f = fired.download(), t = since.download();
    for (std::int64_t k = 0; k < b.keys(); ++k) {
      const std::int64_t hits = b.offsets[k + 1] - b.offsets[k];
      REQUIRE(f[k] == 2 + hits);
      REQUIRE(t[k] == (hits > 0 ? 0 : 105));
    }
  }
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  doctest::Context context(argc, argv);
  const int result = context.run();
  weft::testing::check_cuda(cudaDeviceSynchronize(), "the tests");
  return result;
}

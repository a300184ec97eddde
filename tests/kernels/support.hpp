// SPDX-License-Identifier: Apache-2.0
//
// Shared by the kernel tests: running a case on every backend, arrays in the memory of the kernels that are filled and
// read on the host, random sparse activations with their transpose, parameters of every storage with their values as
// kernels read them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "device/memory.hpp"
#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam_rule.hpp"
#include "kernels/optimize/codec.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/random.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "tests/test.hpp"

namespace weft::testing {

using kernels::AnyMatrix;
using kernels::bf16;
using kernels::ParameterRows;
using kernels::Scalar;
using kernels::StorageType;

constexpr double kRoundoff = 0x1p-24;      ///< of fp32: largest relative error of one rounding to nearest
constexpr double kRoundoffBf16 = 0x1p-8;   ///< of bf16, to nearest; stochastic rounding may err by twice this
constexpr double kRoundoffHalf = 0x1p-11;  ///< of fp16, of numbers from 2^-14 to 65504
/// Types of activations of language models.
constexpr Scalar kRowTypes[] = {Scalar::fp32, Scalar::bf16, Scalar::fp16};

/// A value as a matrix of this type stores it.
inline float stored_as(Scalar type, float value) {
  return type == Scalar::bf16   ? float{kernels::to_bf16(value)}
         : type == Scalar::fp16 ? float{kernels::to_half(value)}
                                : value;
}
constexpr StorageType kPolicies[] = {StorageType::fp32, StorageType::bf16, StorageType::eight_bit};

/// body(execution) on the portable kernels and, in a CUDA build, on the hand-written ones. Both run on the stream of
/// testing::execution(), which also orders the copies of DeviceArray.
template <class Body>
void for_each_backend(const Body& body) {
  kernels::Execution execution = testing::execution();
  for (const kernels::Backend backend : {kernels::Backend::portable, kernels::Backend::cuda}) {
    if (backend == kernels::Backend::cuda && !kernels::kCudaBuild) continue;
    const std::string name = backend == kernels::Backend::cuda ? "cuda" : "portable";
    CAPTURE(name);
    execution.backend = backend;
    body(static_cast<const kernels::Execution&>(execution));
  }
}

/// An array in the memory of the kernels.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::int64_t size) : DeviceArray(std::vector<T>(static_cast<std::size_t>(size))) {}
  explicit DeviceArray(const std::vector<T>& values)
      : buffer_(std::max<std::int64_t>(1, std::ssize(values))), size_(std::ssize(values)) {
    set(values);
  }
  void set(const std::vector<T>& values) {
    device::copy(execution(), buffer_.data(), values.data(), bytes(), device::Direction::to_device);
    kernels::fence(execution());
  }
  std::vector<T> values() const {
    std::vector<T> out(static_cast<std::size_t>(size_));
    device::copy(execution(), out.data(), buffer_.data(), bytes(), device::Direction::to_host);
    kernels::fence(execution());
    return out;
  }
  T* data() const { return buffer_.data(); }
  std::int64_t size() const { return size_; }
  kernels::Array<T> array() const { return {buffer_.data(), size_}; }
  kernels::Matrix<T> matrix(std::int64_t rows, std::int64_t columns) const {
    return {buffer_.data(), rows, columns, columns};
  }

 private:
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(T)); }
  device::Buffer<T> buffer_;
  std::int64_t size_ = 0;
};

/// Uniform in [-1, 1), a function of (stream, index) alone.
inline std::vector<float> random_floats(std::int64_t size, std::uint64_t stream, float scale = 1.0f) {
  std::vector<float> out(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i)
    out[i] =
        scale * (2.0f * kernels::uniform_float(kernels::philox(stream, kernels::Purpose::test, 0, i).word[0]) - 1.0f);
  return out;
}

/// A matrix of any storage type. `values()` are the numbers as stored.
class TestMatrix {
 public:
  TestMatrix(const std::vector<float>& values, std::int64_t rows, std::int64_t columns, Scalar type)
      : rows_(rows), columns_(columns), type_(type) {
    if (type == Scalar::fp32) {
      wide_ = DeviceArray<float>(values);
    } else {
      std::vector<std::uint16_t> narrow(values.size());
      std::transform(values.begin(), values.end(), narrow.begin(), [type](float value) {
        return type == Scalar::bf16 ? kernels::to_bf16(value).bits : kernels::to_half(value).bits;
      });
      narrow_ = DeviceArray<std::uint16_t>(narrow);
    }
  }
  std::vector<float> values() const {
    if (type_ == Scalar::fp32) return wide_.values();
    std::vector<float> values;
    for (const std::uint16_t bits : narrow_.values())
      values.push_back(type_ == Scalar::bf16 ? float{bf16{bits}} : float{kernels::half{bits}});
    return values;
  }
  AnyMatrix view() const {
    void* data = type_ == Scalar::fp32 ? static_cast<void*>(wide_.data()) : static_cast<void*>(narrow_.data());
    return {data, type_, rows_, columns_, columns_};
  }

 private:
  std::int64_t rows_, columns_;
  Scalar type_;
  DeviceArray<float> wide_;
  DeviceArray<std::uint16_t> narrow_;
};

/// Sparse activations on the host, with what the kernels get of them.
struct Sparse {
  std::int64_t n_tokens, n_layers, n_features;
  std::vector<std::int64_t> row_offsets{0};
  std::vector<std::uint32_t> key;
  std::vector<float> value;
  std::vector<std::int64_t> offsets;  // by feature
  std::vector<std::uint32_t> token, position;

  DeviceArray<std::int64_t> device_row_offsets, device_offsets;
  DeviceArray<std::uint32_t> device_key, device_token, device_position;
  DeviceArray<float> device_value;

  std::int64_t size() const { return std::ssize(key); }
  std::int64_t capacity() const { return device_key.size(); }
  std::int64_t n_keys() const { return n_layers * n_features; }
  kernels::SparseActivations csr() const {
    return {n_tokens, n_layers, n_features, device_row_offsets.array(), device_key.array(), device_value.array()};
  }
  kernels::FeatureHits csc() const { return {device_offsets.array(), device_token.array(), device_position.array()}; }
};

/// Entries at random with the given density. With more than two tokens some have none and one has a third of all
/// features; with more than four features one of each layer never fires; with more than eight three fire for nearly
/// every token, two of them adjacent. The device arrays are longer than the lists; the rest is garbage that must not
/// matter.
inline Sparse random_sparse(std::int64_t n_tokens, std::int64_t n_layers, std::int64_t n_features, double density,
                            std::uint64_t stream) {
  Sparse out{};
  out.n_tokens = n_tokens;
  out.n_layers = n_layers;
  out.n_features = n_features;
  for (std::int64_t n = 0; n < n_tokens; ++n) {
    const bool empty = n_tokens > 2 && n % 5 == 1;
    const double chance = n_tokens > 2 && n == n_tokens / 2 ? 1.0 / 3 : density;
    for (std::int64_t key = 0; key < out.n_keys() && !empty; ++key) {
      if (n_features > 4 && key % n_features == 3) continue;  // feature 3 of each layer never fires
      const kernels::Random4 random = kernels::philox(stream, kernels::Purpose::test, 1, n * out.n_keys() + key);
      const std::int64_t feature = key % n_features;
      const bool frequent =
          n_tokens > 2 && n_features > 8 && (feature == 4 || feature == 5 || feature == n_features - 1);
      if (kernels::uniform_float(random.word[0]) >= (frequent ? 0.9375 : chance)) continue;
      out.key.push_back(static_cast<std::uint32_t>(key));
      // Some are listed and not active, as in the windows of jumprelu.
      out.value.push_back((n + key) % 11 == 6 ? 0.0f : 0.1f + kernels::uniform_float(random.word[1]));
    }
    out.row_offsets.push_back(out.size());
  }
  out.offsets.assign(out.n_keys() + 1, 0);
  for (const std::uint32_t key : out.key) ++out.offsets[key + 1];
  for (std::int64_t key = 0; key < out.n_keys(); ++key) out.offsets[key + 1] += out.offsets[key];
  out.token.resize(out.key.size());
  out.position.resize(out.key.size());
  std::vector<std::int64_t> cursor = out.offsets;
  for (std::int64_t n = 0; n < n_tokens; ++n)
    for (std::int64_t entry = out.row_offsets[n]; entry < out.row_offsets[n + 1]; ++entry) {
      const std::int64_t hit = cursor[out.key[entry]]++;
      out.token[hit] = static_cast<std::uint32_t>(n);
      out.position[hit] = static_cast<std::uint32_t>(entry);
    }
  out.device_row_offsets = DeviceArray<std::int64_t>(out.row_offsets);
  out.device_offsets = DeviceArray<std::int64_t>(out.offsets);
  const auto padded = [](auto list, auto garbage) {
    list.resize(list.size() + 57, garbage);
    return list;
  };
  out.device_key = DeviceArray<std::uint32_t>(padded(out.key, 0xfffffffeu));
  out.device_token = DeviceArray<std::uint32_t>(padded(out.token, 0xfffffffeu));
  out.device_position = DeviceArray<std::uint32_t>(padded(out.position, 0xfffffffeu));
  out.device_value = DeviceArray<float>(padded(out.value, std::nanf("")));
  return out;
}

/// w, m and v of a matrix as fp32, for every storage.
struct Values {
  std::vector<float> weight, first_moment, second_moment;
};

/// A parameter matrix of any storage with its memory, as the backend stores it: the CUDA kernels keep fp32 weights as
/// two 16-bit planes.
class Parameters {
 public:
  Parameters(kernels::Backend backend, StorageType storage, std::int64_t rows, std::int64_t columns,
             std::int64_t segment, std::int64_t first_row = 0, std::uint64_t element_base = 0)
      : planes_(backend == kernels::Backend::cuda && storage == StorageType::fp32), backend_(backend) {
    view_.storage = storage;
    view_.rows = rows;
    view_.columns = columns;
    view_.segment = segment;
    view_.first_row = first_row;
    view_.element_base = element_base;
    const std::int64_t size = rows * columns;
    const std::int64_t weight_bytes = storage == StorageType::fp32 && !planes_ ? 4 : 2;
    const std::int64_t moment_bytes = storage == StorageType::fp32 ? 4 : storage == StorageType::bf16 ? 2 : 1;
    weight_ = DeviceArray<std::uint8_t>(size * weight_bytes);
    first_ = DeviceArray<std::uint8_t>(size * moment_bytes);
    second_ = DeviceArray<std::uint8_t>(size * moment_bytes);
    view_.weight = weight_.data();
    if (planes_) {
      rest_ = DeviceArray<std::uint8_t>(size * 2);
      view_.weight_rest = reinterpret_cast<std::int16_t*>(rest_.data());
    }
    view_.first_moment = first_.data();
    view_.second_moment = second_.data();
    if (storage == StorageType::eight_bit) {
      first_scale_ = DeviceArray<float>(rows * view_.blocks_per_row());
      second_scale_ = DeviceArray<float>(rows * view_.blocks_per_row());
      view_.first_scale = first_scale_.data();
      view_.second_scale = second_scale_.data();
    }
  }
  const ParameterRows& view() const { return view_; }
  kernels::Backend backend() const { return backend_; }

  /// Stores values, rounded to nearest as the storage stores them.
  void set(const Values& values) {
    const std::int64_t size = view_.rows * view_.columns;
    if (view_.storage == StorageType::fp32) {
      if (planes_) {
        std::vector<std::uint16_t> high;
        std::vector<std::int16_t> rest;
        for (const float w : values.weight) {
          high.push_back(static_cast<std::uint16_t>((kernels::float_bits(w) + 0x8000u) >> 16));
          rest.push_back(static_cast<std::int16_t>(kernels::float_bits(w) & 0xffffu));
        }
        weight_.set(bytes_of(high));
        rest_.set(bytes_of(rest));
      } else {
        weight_.set(bytes_of(values.weight));
      }
      first_.set(bytes_of(values.first_moment));
      second_.set(bytes_of(values.second_moment));
      return;
    }
    weight_.set(bytes_of(narrow(values.weight)));
    if (view_.storage == StorageType::bf16) {
      first_.set(bytes_of(narrow(values.first_moment)));
      second_.set(bytes_of(narrow(values.second_moment)));
      return;
    }
    std::vector<float> first_scale(first_scale_.size()), second_scale(second_scale_.size());
    for (std::int64_t i = 0; i < size; ++i) {
      first_scale[block(i)] = std::max(first_scale[block(i)], std::abs(values.first_moment[i]) / kernels::kLargestCode);
      second_scale[block(i)] =
          std::max(second_scale[block(i)], std::sqrt(values.second_moment[i]) / kernels::kLargestCode);
    }
    std::vector<std::uint8_t> first(size), second(size);
    for (std::int64_t i = 0; i < size; ++i) {
      const auto nearest = [](float value) { return kernels::code_stochastic(value, 0x8000); };
      first[i] = nearest(values.first_moment[i] / first_scale[block(i)]);
      second[i] = std::max<std::uint8_t>(1, nearest(std::sqrt(values.second_moment[i]) / second_scale[block(i)]));
    }
    first_.set(first);
    second_.set(second);
    first_scale_.set(first_scale);
    second_scale_.set(second_scale);
  }

  /// What is stored, as fp32.
  Values values() const {
    if (view_.storage == StorageType::fp32) {
      std::vector<float> weight = planes_ ? wide(weight_) : floats_of(weight_);
      if (planes_) {
        const std::vector<std::uint8_t> bytes = rest_.values();
        for (std::size_t i = 0; i < weight.size(); ++i) {
          std::int16_t rest;
          std::memcpy(&rest, bytes.data() + 2 * i, sizeof rest);
          weight[i] =
              kernels::bits_float(kernels::float_bits(weight[i]) + static_cast<std::uint32_t>(std::int32_t{rest}));
        }
      }
      return {weight, floats_of(first_), floats_of(second_)};
    }
    if (view_.storage == StorageType::bf16) return {wide(weight_), wide(first_), wide(second_)};
    Values out{wide(weight_), {}, {}};
    const std::vector<std::uint8_t> first = first_.values(), second = second_.values();
    const std::vector<float> first_scale = first_scale_.values(), second_scale = second_scale_.values();
    for (std::int64_t i = 0; i < view_.rows * view_.columns; ++i) {
      out.first_moment.push_back(kernels::code_to_float(first[i]) * first_scale[block(i)]);
      const float root = kernels::code_to_float(second[i]) * second_scale[block(i)];
      out.second_moment.push_back(root * root);
    }
    return out;
  }

  /// The weights as products read them: of two planes the bf16 one.
  std::vector<float> read_weights() const { return planes_ ? wide(weight_) : values().weight; }

  /// Every stored bit of rows [begin, end), to compare two states (compare in parentheses: it is not text).
  std::string bits(std::int64_t begin, std::int64_t end) const {
    std::string out;
    const auto append = [&](const std::vector<std::uint8_t>& all) {
      const std::int64_t row = std::ssize(all) / view_.rows;
      out.append(reinterpret_cast<const char*>(all.data()) + begin * row, (end - begin) * row);
    };
    append(weight_.values());
    if (planes_) append(rest_.values());
    append(first_.values());
    append(second_.values());
    if (view_.storage == StorageType::eight_bit) {
      append(bytes_of(first_scale_.values()));
      append(bytes_of(second_scale_.values()));
    }
    return out;
  }
  std::string bits() const { return bits(0, view_.rows); }

  /// Block of element i, by the definition: blocks of 256 columns inside a target segment.
  std::int64_t block(std::int64_t i) const {
    const std::int64_t row = i / view_.columns, column = i % view_.columns;
    const std::int64_t blocks_per_segment = (view_.segment + 255) / 256;
    return (row * (view_.columns / view_.segment) + column / view_.segment) * blocks_per_segment +
           column % view_.segment / 256;
  }

 private:
  template <class T>
  static std::vector<std::uint8_t> bytes_of(const std::vector<T>& values) {
    const auto* first = reinterpret_cast<const std::uint8_t*>(values.data());
    return {first, first + values.size() * sizeof(T)};
  }
  static std::vector<bf16> narrow(const std::vector<float>& values) {
    std::vector<bf16> out(values.size());
    std::transform(values.begin(), values.end(), out.begin(), kernels::to_bf16);
    return out;
  }
  static std::vector<float> floats_of(const DeviceArray<std::uint8_t>& array) {
    const std::vector<std::uint8_t> bytes = array.values();
    std::vector<float> out(bytes.size() / sizeof(float));
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  static std::vector<float> wide(const DeviceArray<std::uint8_t>& array) {
    const std::vector<std::uint8_t> bytes = array.values();
    std::vector<bf16> narrow(bytes.size() / sizeof(bf16));
    if (!narrow.empty()) std::memcpy(narrow.data(), bytes.data(), bytes.size());
    return {narrow.begin(), narrow.end()};
  }

  bool planes_;
  kernels::Backend backend_;
  ParameterRows view_;
  DeviceArray<std::uint8_t> weight_, rest_, first_, second_;
  DeviceArray<float> first_scale_, second_scale_;
};

/// Weights in [-scale, scale), m in +-0.01, v in (0, 1e-4): a state in the middle of a training run.
inline Values random_state(std::int64_t size, std::uint64_t stream, float scale = 0.5f) {
  Values out{random_floats(size, stream, scale), random_floats(size, stream + 1, 0.01f),
             random_floats(size, stream + 2, 0.01f)};
  for (float& v : out.second_moment) v = std::max(v * v, 1e-12f);
  return out;
}

/// The step of the tests, at step 7 of a run, with a clipping factor and weight decay.
inline kernels::AdamStep test_step() {
  const float beta1 = 0.9f, beta2 = 0.999f;
  return {
      1e-2f, beta1, beta2, 0.1f, 0.001f, 1e-8f, 0.1f, 1 / (1 - std::pow(beta1, 7.0f)), 1 / (1 - std::pow(beta2, 7.0f)),
      0.75f, 42,    7};
}

/// A step after which the first moments are the gradients themselves (of fp32 state; weights stay).
inline kernels::AdamStep gradient_step() {
  kernels::AdamStep step = test_step();
  step.learning_rate = step.beta1 = 0.0f;
  step.first_gain = step.gradient_scale = 1.0f;
  return step;
}
inline kernels::Matrix<const float> first_moment(const Parameters& fp32) {
  const ParameterRows& p = fp32.view();
  return {static_cast<const float*>(p.first_moment), p.rows, p.columns, p.columns};
}

/// Adam in float64 on one parameter, from the formula in adam.hpp. gradient: before scaling.
struct Adam64 {
  double weight, first_moment, second_moment;
};
inline Adam64 adam64(const kernels::AdamStep& a, double weight_decay, double w, double m, double v, double gradient) {
  const double g = a.gradient_scale * gradient;
  const double m1 = static_cast<double>(a.beta1) * m + static_cast<double>(a.first_gain) * g;
  const double v1 = static_cast<double>(a.beta2) * v + static_cast<double>(a.second_gain) * g * g;
  const double step = m1 * a.first_correction / (std::sqrt(v1 * a.second_correction) + a.epsilon) + weight_decay * w;
  return {w - a.learning_rate * step, m1, v1};
}

/// True if the 16-bit and 8-bit results are those of the shared codec and random bits for the exact values, but for a
/// few that lie within the arithmetic's error of a border between two codes. first_largest, second_largest: by block.
inline bool rounds_as_defined(const Parameters& parameters, const Values& after, const std::vector<Adam64>& exact,
                              const std::vector<double>& first_largest, const std::vector<double>& second_largest,
                              const kernels::AdamStep& step) {
  const ParameterRows& view = parameters.view();
  const std::int64_t size = std::ssize(exact);
  std::int64_t other_weight = 0, other_first = 0, other_second = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::uint64_t element = view.global_element(i / view.columns, i % view.columns);
    const int part = static_cast<int>(element % kernels::kElementsPerRandom);
    const kernels::Random4 random = kernels::rounding_random(step, element / kernels::kElementsPerRandom);
    const auto rounded = [&](double value, int flip) -> float {
      return kernels::to_bf16_stochastic(static_cast<float>(value), kernels::rounding_bits(random, part ^ flip));
    };
    other_weight += rounded(exact[i].weight, 0) != after.weight[i];
    double first = 0, second = 0, tolerance = 0;
    if (view.storage == StorageType::bf16) {
      first = rounded(exact[i].first_moment, kernels::kFirstMomentPart);
      second = rounded(exact[i].second_moment, kernels::kSecondMomentPart);
    } else {
      const float first_scale = kernels::block_scale(static_cast<float>(first_largest[parameters.block(i)])),
                  second_scale = kernels::block_scale(static_cast<float>(second_largest[parameters.block(i)]));
      first = kernels::code_to_float(kernels::code_stochastic(
                  static_cast<float>(exact[i].first_moment) * kernels::inverse_scale(first_scale),
                  kernels::rounding_bits(random, part ^ kernels::kFirstMomentPart))) *
              first_scale;
      second = kernels::code_to_float(kernels::code_stochastic_root(
                   static_cast<float>(std::sqrt(exact[i].second_moment)) * kernels::inverse_scale(second_scale),
                   kernels::rounding_bits(random, part ^ kernels::kSecondMomentPart))) *
               second_scale;
      second *= second;
      tolerance = 1e-4;  // of the scales; codes are 6 % apart
    }
    other_first += std::abs(first - after.first_moment[i]) > tolerance * std::abs(first);
    other_second += std::abs(second - after.second_moment[i]) > tolerance * std::abs(second);
  }
  const std::int64_t allowed = static_cast<std::int64_t>(0.003 * static_cast<double>(size)) + 3;
  if (other_weight <= allowed && other_first <= allowed && other_second <= allowed) return true;
  MESSAGE("rounded otherwise: " << other_weight << " weights, " << other_first << " first and " << other_second
                                << " second moments of " << size);
  return false;
}

/// Compares stored parameters with the float64 rule applied to the state before. `gradient_error` bounds |gradient -
/// exact| absolutely; scales are block maxima for 8bit. Returns false and reports the element if a bound is broken, or
/// if the results are not rounded with the random bits of adam_rule.hpp.
inline bool agrees_with_adam(const Parameters& parameters, const Values& before, const std::vector<double>& gradient,
                             const std::vector<double>& gradient_error, const kernels::AdamStep& step) {
  const Values after = parameters.values();
  const StorageType storage = parameters.view().storage;
  const std::int64_t size = std::ssize(before.weight);
  // Roundings in the direction. CUDA: folded constants (5), an approximate root and reciprocal (2^-22 each).
  const bool approximate = parameters.backend() == kernels::Backend::cuda;
  const double direction_roundings = approximate ? 24 : 8, v_roundings = approximate ? 16 : 6;
  // Largest magnitude of a block of the exact m and sqrt(v): what its scale is made of.
  std::vector<double> first_largest(size), second_largest(size);
  std::vector<Adam64> exact(size);
  for (std::int64_t i = 0; i < size; ++i) {
    exact[i] =
        adam64(step, step.weight_decay, before.weight[i], before.first_moment[i], before.second_moment[i], gradient[i]);
    const std::int64_t b = parameters.block(i);
    first_largest[b] = std::max(first_largest[b], std::abs(exact[i].first_moment));
    second_largest[b] = std::max(second_largest[b], std::sqrt(exact[i].second_moment));
  }
  for (std::int64_t i = 0; i < size; ++i) {
    const double g_error = gradient_error[i] * step.gradient_scale;
    const double g = std::abs(step.gradient_scale * gradient[i]);
    // fp32 (1 - beta is exact for beta in [0.5, 1]): scaling, product and sum, at most 4 roundings on m and 6 on v.
    const double m_error = 4 * kRoundoff * (std::abs(before.first_moment[i]) + g) + 0.1 * g_error;
    const double v_error =
        v_roundings * kRoundoff * exact[i].second_moment + 1e-3 * (2 * g * g_error + g_error * g_error);
    // The direction m / sqrt(v): relative errors add; 8 roundings.
    const double root = std::sqrt(exact[i].second_moment * step.second_correction) + step.epsilon;
    const double direction = std::abs(exact[i].first_moment * step.first_correction / root);
    const double v_relative = exact[i].second_moment > 0 ? v_error / exact[i].second_moment : 0.0;
    const double w_error = step.learning_rate * (m_error * step.first_correction / root +
                                                 direction * (v_relative + direction_roundings * kRoundoff)) +
                           4 * kRoundoff * std::abs(before.weight[i]) + 2 * kRoundoff * std::abs(exact[i].weight);
    double m_storage = 0, v_storage = 0, w_storage = 0;
    if (storage != StorageType::fp32)
      w_storage = 2 * kRoundoffBf16 * std::abs(exact[i].weight);  // stochastic: one spacing
    if (storage == StorageType::bf16) {
      m_storage = 2 * kRoundoffBf16 * std::abs(exact[i].first_moment);
      v_storage = 2 * kRoundoffBf16 * exact[i].second_moment;
    }
    if (storage == StorageType::eight_bit) {
      // Stochastic: 2^-3 of m and of sqrt(v) or one smallest code; the square doubles the relative error.
      const double m_unit = first_largest[parameters.block(i)] / 448 * 0x1p-9,
                   v_unit = second_largest[parameters.block(i)] / 448 * 0x1p-9;
      m_storage = std::max(0x1p-3 * std::abs(exact[i].first_moment), m_unit) * 1.001;
      const double s = std::sqrt(exact[i].second_moment), s_error = std::max(0x1p-3 * s, v_unit) * 1.001;
      v_storage = 2 * s * s_error + s_error * s_error;
    }
    const double w_off = std::abs(after.weight[i] - exact[i].weight),
                 m_off = std::abs(after.first_moment[i] - exact[i].first_moment),
                 v_off = std::abs(after.second_moment[i] - exact[i].second_moment);
    if (!(w_off <= w_error + w_storage && m_off <= m_error * 1.01 + m_storage && v_off <= v_error * 1.01 + v_storage)) {
      MESSAGE("element " << i << ": w " << after.weight[i] << " for " << exact[i].weight << " (" << w_off << " <= "
                         << w_error + w_storage << "), m " << after.first_moment[i] << " for " << exact[i].first_moment
                         << " (" << m_off << " <= " << m_error + m_storage << "), v " << after.second_moment[i]
                         << " for " << exact[i].second_moment << " (" << v_off << " <= " << v_error + v_storage << ")");
      return false;
    }
  }
  return storage == StorageType::fp32 ||
         rounds_as_defined(parameters, after, exact, first_largest, second_largest, step);
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// Non-owning views of memory: the arguments of kernels. Every view passed to a kernel must be accessible where it runs
// (device memory in a GPU build).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Functions that both a host compiler and nvcc's device pass accept.
#ifdef __CUDACC__
#define WEFT_HOST_DEVICE __host__ __device__
#else
#define WEFT_HOST_DEVICE
#endif

namespace weft::kernels {

template <class T>
struct Array {
  T* data = nullptr;
  std::int64_t size = 0;

  WEFT_HOST_DEVICE constexpr T& operator[](std::int64_t i) const { return data[i]; }
  constexpr operator Array<const T>() const requires(!std::is_const_v<T>) { return {data, size}; }
};

/// Row-major; consecutive rows are `stride` elements apart.
template <class T>
struct Matrix {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;

  WEFT_HOST_DEVICE constexpr T* row(std::int64_t i) const { return data + i * stride; }
  WEFT_HOST_DEVICE constexpr T& operator()(std::int64_t i, std::int64_t j) const { return data[i * stride + j]; }
  constexpr operator Matrix<const T>() const requires(!std::is_const_v<T>) { return {data, rows, columns, stride}; }
};

/// Storage type of one number.
enum class Scalar : int { fp32, fp16, bf16, fp64, u8, u16, i16, i32, i64, u32, u64 };

constexpr std::int64_t bytes_of(Scalar type) {
  switch (type) {
    case Scalar::u8:
      return 1;
    case Scalar::fp16:
    case Scalar::bf16:
    case Scalar::u16:
    case Scalar::i16:
      return 2;
    case Scalar::fp32:
    case Scalar::i32:
    case Scalar::u32:
      return 4;
    case Scalar::fp64:
    case Scalar::i64:
    case Scalar::u64:
      return 8;
  }
  return 0;
}

/// A matrix whose element type is known at run time: inputs, products, reconstructions and gradient rows are fp32,
/// bf16 or fp16, according to `device.precision`. `stride` counts elements.
struct AnyMatrix {
  void* data = nullptr;
  Scalar type = Scalar::fp32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;

  /// Rows [begin, begin + count).
  AnyMatrix rows_from(std::int64_t begin, std::int64_t count) const {
    return {static_cast<char*>(data) + begin * stride * bytes_of(type), type, count, columns, stride};
  }
  /// Columns [begin, begin + count).
  AnyMatrix columns_from(std::int64_t begin, std::int64_t count) const {
    return {static_cast<char*>(data) + begin * bytes_of(type), type, rows, count, stride};
  }
};

}  // namespace weft::kernels

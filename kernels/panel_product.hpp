// SPDX-License-Identifier: Apache-2.0
//
// Product with a panel: a matrix [n][kLanes] in scratch, whose lanes are the rows or columns that stay there while the
// other side passes by. Every element of the result is one chain of multiply_add over the inner index, whatever the
// other elements are.
#pragma once

#include "kernels/portable.hpp"
#if defined(__FMA__) && !defined(KOKKOS_ENABLE_CUDA)
#include <immintrin.h>
#endif

namespace weft::kernels::portable::panels {

#if defined(KOKKOS_ENABLE_CUDA)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 16;
#endif
constexpr int kMicroRows = 4;  // rows of a product that are computed together; divides head sizes

/// a(m, k) = data[m * row + k * step].
struct Factor {
  const float* data;
  int row, step;
};

#ifndef KOKKOS_ENABLE_CUDA
/// Eight lanes.
using Vector = float __attribute__((vector_size(32), may_alias));
constexpr int kVectors = kLanes / 8;

inline Vector multiply_add(float a, const Vector& b, const Vector& c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
#else
  return a * b + c;
#endif
}
#endif

/// c[m][lane] = (sum: c[m][lane] +) sum over k < n_inner of a(m, k) * b[k][lane] for m < n_rows.
template <bool kSum>
KOKKOS_FORCEINLINE_FUNCTION void product(const Team& team, int n_rows, int n_inner, const Factor& a, const float* b,
                                         float* c) {
#ifdef KOKKOS_ENABLE_CUDA
  team.team_barrier();
  for_columns(team, n_rows * kLanes, [&](int e) {
    const int m = e / kLanes, lane = e % kLanes;
    float sum = kSum ? c[e] : 0.0f;
    for (int k = 0; k < n_inner; ++k) sum = multiply_add(a.data[m * a.row + k * a.step], b[k * kLanes + lane], sum);
    c[e] = sum;
  });
  team.team_barrier();
#else
  static_cast<void>(team);
  for (int m = 0; m < n_rows; m += kMicroRows) {
    const float* factor = a.data + m * a.row;
    Vector* to = reinterpret_cast<Vector*>(c + m * kLanes);
    Vector sum[kMicroRows][kVectors];
    for (int r = 0; r < kMicroRows; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] = kSum ? to[r * kVectors + v] : Vector{};
    for (int k = 0; k < n_inner; ++k) {
      const Vector* row = reinterpret_cast<const Vector*>(b + k * kLanes);
      for (int r = 0; r < kMicroRows; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(factor[r * a.row + k * a.step], row[v], sum[r][v]);
    }
    for (int r = 0; r < kMicroRows; ++r)
      for (int v = 0; v < kVectors; ++v) to[r * kVectors + v] = sum[r][v];
  }
#endif
}

/// Arrays of floats from the scratch of a team; without memory it measures.
class Pieces {
 public:
  KOKKOS_FORCEINLINE_FUNCTION explicit Pieces(void* base) : base_(static_cast<float*>(base)) {}
  KOKKOS_FORCEINLINE_FUNCTION float* take(int size) {
    float* piece = base_ == nullptr ? nullptr : base_ + size_;
    size_ += (size + 15) / 16 * 16;  // 64 bytes
    return piece;
  }
  std::size_t bytes() const { return size_ * sizeof(float); }

 private:
  float* base_;
  std::int64_t size_ = 0;
};

}  // namespace weft::kernels::portable::panels

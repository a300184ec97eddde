// SPDX-License-Identifier: Apache-2.0
//
// Cost of the norm of a per-example gradient dW = Gᵀ X, X [T, in], G [T, out], without the gradient of the example:
//
//   direct   sum of the squares of dW, formed tile by tile           2 T in out           FLOPs
//   gram     sum over positions t, s of (X Xᵀ)_ts (G Gᵀ)_ts          T (T + tile)(in + out)
//
// The Gram form visits pairs of tiles of positions with i <= j only. Both read 2-byte rows once; neither stores a
// matrix of T x T or in x out, so that memory is no criterion of the choice.
#pragma once

#include <cstdint>

namespace weft::kernels {

/// Input names: "input_length" is direct (linear in T), "width" is gram (linear in the widths).
enum class NormAlgorithm { direct, gram };

/// FLOPs per example of T rows.
constexpr double norm_cost(NormAlgorithm algorithm, std::int64_t in, std::int64_t out, std::int64_t rows,
                           std::int64_t tile) {
  const double t = static_cast<double>(rows), d = static_cast<double>(in), p = static_cast<double>(out);
  return algorithm == NormAlgorithm::direct ? 2 * t * d * p : t * (t + static_cast<double>(tile)) * (d + p);
}

/// Rows at which both algorithms take the same number of operations, without the tile: the harmonic mean of the widths.
constexpr double crossover_rows(std::int64_t in, std::int64_t out) {
  const double d = static_cast<double>(in), p = static_cast<double>(out);
  return 2 * d * p / (d + p);
}

/// Cheaper algorithm: gram if and only if T + tile < kappa * 2 in out / (in + out). kappa: measured rate of gram over
/// that of direct. Below 1 it prefers direct, whose sums cancel less (norms.hpp).
constexpr NormAlgorithm choose_algorithm(std::int64_t in, std::int64_t out, std::int64_t rows, std::int64_t tile,
                                         double kappa) {
  return static_cast<double>(rows + tile) < kappa * crossover_rows(in, out) ? NormAlgorithm::gram
                                                                            : NormAlgorithm::direct;
}

/// Positions of a side of a Gram tile where the input has 0, automatic.
constexpr std::int64_t automatic_tile(std::int64_t rows) { return rows < 1024 ? 256 : rows < 4096 ? 512 : 1024; }

}  // namespace weft::kernels

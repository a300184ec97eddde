// SPDX-License-Identifier: Apache-2.0
//
// Shared by the tests of the row-wise kernels of language models: rows inside a wider matrix, errors of whole tensors,
// derivatives of float64 references.
#pragma once

#include "tests/kernels/support.hpp"

namespace weft::testing {

/// Largest relative error, in the 2-norm of a tensor, of a row-wise kernel against float64 on the same stored inputs.
/// fp32: a few roundings of each element and the error of a sum over the row; bf16: one rounding of the result, whose
/// relative error is uniform below 2^-8; fp16: an eighth of it.
inline double row_tolerance(Scalar type) { return type == Scalar::fp32 ? 1e-6 : type == Scalar::bf16 ? 4e-3 : 5e-4; }

/// ||got - want|| / ||want||; without a norm of `want`, ||got||.
template <class Got>
double relative_error(const std::vector<Got>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - want[i];
    error += difference * difference;
    norm += want[i] * want[i];
  }
  return std::sqrt(norm > 0 ? error / norm : error);
}

/// Where the columns of a matrix lie in its rows: `before` elements come first, `after` last.
struct Margins {
  std::int64_t before = 0, after = 0;
};
/// Contiguous; rows that can be read 8 columns at a time if the columns are a multiple of 8; rows that cannot.
constexpr Margins kMargins[] = {{0, 0}, {16, 8}, {3, 2}};

/// A matrix of either storage type with margins that no kernel may touch.
class Rows {
 public:
  Rows(const std::vector<float>& values, std::int64_t rows, std::int64_t columns, Scalar type, Margins margins = {})
      : rows_(rows),
        columns_(columns),
        margins_(margins),
        all_(padded(values, rows, columns, margins), rows, margins.before + columns + margins.after, type) {}
  /// Without contents.
  Rows(std::int64_t rows, std::int64_t columns, Scalar type, Margins margins = {})
      : Rows(std::vector<float>(static_cast<std::size_t>(rows * columns), std::nanf("")), rows, columns, type,
             margins) {}

  AnyMatrix view() const { return all_.view().columns_from(margins_.before, columns_); }
  /// The columns, as stored. Fails if a margin was written.
  std::vector<float> values() const {
    const std::vector<float> all = all_.values();
    const std::int64_t stride = margins_.before + columns_ + margins_.after;
    std::vector<float> out;
    bool untouched = true;
    for (std::int64_t i = 0; i < std::ssize(all); ++i) {
      const std::int64_t column = i % stride - margins_.before;
      if (column >= 0 && column < columns_)
        out.push_back(all[i]);
      else
        untouched = untouched && all[i] == kMargin;
    }
    CHECK_MESSAGE(untouched, "a kernel wrote outside the columns of its matrix");
    return out;
  }

 private:
  static constexpr float kMargin = 77.0f;
  static std::vector<float> padded(const std::vector<float>& values, std::int64_t rows, std::int64_t columns,
                                   Margins margins) {
    const std::int64_t stride = margins.before + columns + margins.after;
    std::vector<float> out(static_cast<std::size_t>(rows * stride), kMargin);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      out[i / columns * stride + margins.before + i % columns] = values[i];
    return out;
  }

  std::int64_t rows_, columns_;
  Margins margins_;
  TestMatrix all_;
};

inline std::vector<double> widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

}  // namespace weft::testing

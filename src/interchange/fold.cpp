// SPDX-License-Identifier: Apache-2.0
#include "interchange/fold.hpp"

#include <algorithm>

#include "kernels/bf16.hpp"

namespace weft::interchange {

void FoldedRows::read(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  source_.read(part, layer, rows, to);
  const std::int64_t d = contents().sizes.d_model, columns = extent_of(contents(), part, layer).columns;
  // Scales and means of the layer that a part reads from or, for a decoder's strips, of the layers that it writes to.
  const std::size_t first = static_cast<std::size_t>(layer * d);
  const float *const u = normalisation_.inputs.scale.data() + first,
                     *const v = normalisation_.targets.scale.data() + first,
                     *const n = normalisation_.targets.mean.data() + first;
  const auto each = [&](auto&& change) {
    for (std::int64_t i = 0; i < rows.size(); ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        float& value = to[i * columns + j];
        value = static_cast<float>(change(static_cast<double>(value), i, j));
      }
  };
  switch (part) {
    case Part::encoder:
      each([&](double w, std::int64_t, std::int64_t j) { return w * u[j]; });
      break;
    case Part::decoder:
      each([&](double w, std::int64_t, std::int64_t j) { return w / v[j]; });
      break;
    case Part::skip:
      each([&](double w, std::int64_t i, std::int64_t j) { return w / v[rows.begin + i] * u[j]; });
      break;
    case Part::encoder_bias: {
      const std::vector<double> shift = times_means(Part::encoder, layer, rows);
      each([&](double b, std::int64_t i, std::int64_t) { return b - shift[static_cast<std::size_t>(i)]; });
      break;
    }
    case Part::decoder_bias: {
      std::vector<double> shift(static_cast<std::size_t>(rows.size()), 0.0);
      if (contents().skip) shift = times_means(Part::skip, layer, rows);
      each([&](double b, std::int64_t i, std::int64_t) {
        return b / v[rows.begin + i] + n[rows.begin + i] - shift[static_cast<std::size_t>(i)];
      });
      break;
    }
    case Part::threshold:
    case Part::offset:
    case Part::scale:
      break;
  }
}

std::vector<double> FoldedRows::times_means(Part part, std::int64_t layer, parallel::Range rows) const {
  const Extent extent = extent_of(contents(), part, layer);
  const float* const m = normalisation_.inputs.mean.data() + layer * contents().sizes.d_model;
  const std::int64_t most = piece_rows(extent);
  std::vector<double> sums;
  std::vector<float> piece;
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += most) {
    const parallel::Range part_rows{begin, std::min(rows.end, begin + most)};
    piece.resize(static_cast<std::size_t>(part_rows.size() * extent.columns));
    read(part, layer, part_rows, piece.data());
    for (std::int64_t i = 0; i < part_rows.size(); ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < extent.columns; ++j) {
        const float w = piece[static_cast<std::size_t>(i * extent.columns + j)];
        sum += static_cast<double>(matrices_ == kernels::Scalar::bf16 ? float(kernels::to_bf16(w)) : w) * m[j];
      }
      sums.push_back(sum);
    }
  }
  return sums;
}

}  // namespace weft::interchange

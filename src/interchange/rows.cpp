// SPDX-License-Identifier: Apache-2.0
#include "interchange/rows.hpp"

#include <algorithm>

namespace weft::interchange {

bool is_affine(Part part) { return part == Part::offset || part == Part::scale; }

Extent extent_of(const Contents& contents, Part part, std::int64_t layer) {
  const Sizes& sizes = contents.sizes;
  switch (part) {
    case Part::encoder:
      return {sizes.n_features, sizes.d_model};
    case Part::encoder_bias:
    case Part::threshold:
    case Part::offset:
    case Part::scale:
      return {sizes.n_features, 1};
    case Part::decoder:
      return {sizes.n_features,
              (contents.per_layer || contents.tying != Tying::none ? 1 : sizes.n_layers - layer) * sizes.d_model};
    case Part::decoder_bias:
      return {sizes.d_model, 1};
    case Part::skip:
      return {sizes.d_model, sizes.d_model};
  }
  return {};
}

std::vector<std::pair<Part, std::int64_t>> parts_of(const Contents& contents) {
  std::vector<std::pair<Part, std::int64_t>> parts;
  for (std::int64_t layer = 0; layer < contents.sizes.n_layers; ++layer)
    for (const Part part : {Part::encoder, Part::encoder_bias, Part::threshold, Part::decoder, Part::decoder_bias,
                            Part::skip, Part::offset, Part::scale})
      if ((part != Part::threshold || contents.thresholds) && (part != Part::skip || contents.skip) &&
          (!is_affine(part) || contents.affine))
        parts.emplace_back(part, layer);
  return parts;
}

std::int64_t piece_rows(const Extent& extent) {
  constexpr std::int64_t kPieceBytes = std::int64_t{64} << 20;
  const std::int64_t row_bytes = extent.columns * static_cast<std::int64_t>(sizeof(float));
  return std::clamp<std::int64_t>(kPieceBytes / std::max<std::int64_t>(1, row_bytes), 1,
                                  std::max<std::int64_t>(1, extent.rows));
}

}  // namespace weft::interchange

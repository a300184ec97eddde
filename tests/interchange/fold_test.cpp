// SPDX-License-Identifier: Apache-2.0
//
// The normalisation of a dataset is folded into the matrices and biases of a transcoder.
#include "interchange/fold.hpp"

#include "kernels/bf16.hpp"
#include "tests/interchange/known_model.hpp"

using namespace weft;
using namespace weft::interchange;
using namespace weft::interchange::testing;

TEST_CASE("folding: the formulas, with biases of the rounded matrices") {
  dataset::Normalisation normalisation;
  for (std::int64_t j = 0; j < L * d; ++j) {
    normalisation.inputs.mean.push_back(static_cast<float>(j) - 3);
    normalisation.inputs.scale.push_back(1 + 0.1f * static_cast<float>(j));
    normalisation.targets.mean.push_back(2 - static_cast<float>(j));
    normalisation.targets.scale.push_back(3 + 0.1f * static_cast<float>(j));
  }
  const Model model(true, true);
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16}) {
    const FoldedRows folded(model, normalisation, type);
    const auto read = [&](Part part, std::int64_t layer) {
      const Extent extent = extent_of(model.contents(), part, layer);
      std::vector<float> values(static_cast<std::size_t>(extent.rows * extent.columns));
      folded.read(part, layer, {0, 1}, values.data());
      folded.read(part, layer, {1, extent.rows}, values.data() + extent.columns);
      return values;
    };
    const auto rounded = [&](float value) {
      return static_cast<double>(type == kernels::Scalar::bf16 ? float(kernels::to_bf16(value)) : value);
    };
    for (std::int64_t l = 0; l < L; ++l) {
      const auto at = [&](const std::vector<float>& all, std::int64_t layer, std::int64_t i) {
        return static_cast<double>(all[static_cast<std::size_t>(layer * d + i)]);
      };
      const std::vector<float> w = read(Part::encoder, l), b = read(Part::encoder_bias, l),
                               rows = read(Part::decoder, l), c = read(Part::decoder_bias, l),
                               skip = read(Part::skip, l);
      for (std::int64_t f = 0; f < F; ++f) {
        double shift = 0;
        for (std::int64_t i = 0; i < d; ++i) {
          const auto index = static_cast<std::size_t>(f * d + i);
          CHECK(w[index] ==
                static_cast<float>(static_cast<double>(encoder(l, f, i)) * at(normalisation.inputs.scale, l, i)));
          shift += rounded(w[index]) * at(normalisation.inputs.mean, l, i);
        }
        CHECK(b[static_cast<std::size_t>(f)] == static_cast<float>(encoder_bias(l, f) - shift));
        for (std::int64_t t = l; t < L; ++t)
          for (std::int64_t i = 0; i < d; ++i)
            CHECK(rows[static_cast<std::size_t>((f * (L - l) + t - l) * d + i)] ==
                  static_cast<float>(decoder(l, t, f, i) / at(normalisation.targets.scale, t, i)));
      }
      for (std::int64_t i = 0; i < d; ++i) {
        double shift = 0;
        for (std::int64_t j = 0; j < d; ++j)
          shift += rounded(skip[static_cast<std::size_t>(i * d + j)]) * at(normalisation.inputs.mean, l, j);
        CHECK(c[static_cast<std::size_t>(i)] ==
              static_cast<float>(decoder_bias(l, i) / at(normalisation.targets.scale, l, i) +
                                 at(normalisation.targets.mean, l, i) - shift));
      }
      CHECK(read(Part::threshold, l)[2] == theta(l, 2));
    }
  }
}

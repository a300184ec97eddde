// SPDX-License-Identifier: Apache-2.0
//
// A model whose values encode what they are, so that every element of a file has one right place.
#pragma once

#include <cmath>
#include <fstream>

#include "interchange/formats.hpp"
#include "tests/scratch.hpp"

namespace weft::interchange::testing {
namespace fs = std::filesystem;

constexpr std::int64_t L = 3, F = 5, d = 4;
constexpr Sizes kSizes{L, d, F};

// Different for every element, exact in fp32 and, except for decoders, in sums with biases.
inline float encoder(std::int64_t s, std::int64_t f, std::int64_t i) {
  return static_cast<float>(1000 + s * 100 + f * 10 + i);
}
inline float encoder_bias(std::int64_t s, std::int64_t f) { return static_cast<float>(2000 + s * 10 + f); }
inline float theta(std::int64_t s, std::int64_t f) { return 0.25f * static_cast<float>(1 + s * 10 + f); }
inline float decoder(std::int64_t s, std::int64_t t, std::int64_t f, std::int64_t i) {
  return static_cast<float>(10'000 + s * 1000 + t * 100 + f * 10 + i);
}
inline float other(std::int64_t layer, std::int64_t r, std::int64_t c) {
  return static_cast<float>(layer * 100 + r * 10 + c);
}
inline float decoder_bias(std::int64_t t, std::int64_t i) { return static_cast<float>(3000 + t * 10 + i); }

/// A file whose tensors are filled by functions of their row-major index.
struct Filled {
  std::string name;
  std::vector<std::int64_t> shape;
  std::function<float(std::int64_t)> value;
};
inline void write_file(const fs::path& path, const std::vector<Filled>& tensors) {
  std::vector<SafetensorsWriter::Tensor> declared;
  for (const Filled& tensor : tensors) declared.push_back({tensor.name, kernels::Scalar::fp32, tensor.shape});
  SafetensorsWriter writer(path, declared);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : tensors[i].shape) elements *= extent;
    std::vector<float> values;
    for (std::int64_t j = 0; j < elements; ++j) values.push_back(tensors[i].value(j));
    writer.write(i, 0, values);
  }
  writer.finish();
}
inline void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

/// All parts have the values above; read in pieces of `step` rows. Thresholds within the rounding of exp(log).
inline void check_rows(const RowSource& source, std::int64_t step) {
  REQUIRE(source.contents().sizes.n_layers == L);
  REQUIRE(source.contents().sizes.n_features == F);
  REQUIRE(source.contents().sizes.d_model == d);
  for (const auto& [part, layer] : parts_of(source.contents())) {
    const Extent extent = extent_of(source.contents(), part, layer);
    for (std::int64_t begin = 0; begin < extent.rows; begin += step) {
      const parallel::Range rows{begin, std::min(extent.rows, begin + step)};
      std::vector<float> values(static_cast<std::size_t>(rows.size() * extent.columns), -1.0f);
      source.read(part, layer, rows, values.data());
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = 0; c < extent.columns; ++c) {
          const float value = values[static_cast<std::size_t>((r - rows.begin) * extent.columns + c)];
          CAPTURE(static_cast<int>(part));
          CAPTURE(layer);
          CAPTURE(r);
          CAPTURE(c);
          if (part == Part::encoder) CHECK(value == encoder(layer, r, c));
          if (part == Part::encoder_bias) CHECK(value == encoder_bias(layer, r));
          if (part == Part::threshold) CHECK(std::abs(value - theta(layer, r)) <= 1e-6f * theta(layer, r));
          if (part == Part::decoder) CHECK(value == decoder(layer, layer + c / d, r, c % d));
          if (part == Part::decoder_bias) CHECK(value == decoder_bias(layer, r));
          if (part == Part::skip || part == Part::offset || part == Part::scale) CHECK(value == other(layer, r, c));
        }
    }
  }
}

/// The model above as a source, for writing.
class Model : public RowSource {
 public:
  explicit Model(bool thresholds, bool skip = false)
      : contents_{.sizes = kSizes, .thresholds = thresholds, .skip = skip} {}
  explicit Model(Contents contents) : contents_(contents) {}
  const Contents& contents() const override { return contents_; }
  void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const override {
    const std::int64_t columns = extent_of(contents_, part, layer).columns;
    for (std::int64_t r = rows.begin; r < rows.end; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        *to++ = part == Part::encoder        ? encoder(layer, r, c)
                : part == Part::encoder_bias ? encoder_bias(layer, r)
                : part == Part::threshold    ? theta(layer, r)
                : part == Part::decoder      ? decoder(layer, layer + c / d, r, c % d)
                : part == Part::decoder_bias ? decoder_bias(layer, r)
                                             : other(layer, r, c);
  }

 private:
  Contents contents_;
};

constexpr Storage kExact{kernels::Scalar::fp32, kernels::Scalar::fp32};

/// The first `columns` columns of a decoder row are those of the own layer.
inline Contents single_layers(bool thresholds, bool skip, std::int64_t k = 0, bool autoencoder = false) {
  return {
      .sizes = kSizes, .thresholds = thresholds, .skip = skip, .per_layer = true, .autoencoder = autoencoder, .k = k};
}

}  // namespace weft::interchange::testing

// SPDX-License-Identifier: Apache-2.0
//
// Files that the packages themselves have written (fixtures/write_fixtures.py names the versions): the features and
// outputs of what is read, by plain sums, are those that the packages compute.
#include <algorithm>
#include <cmath>

#include "interchange/formats.hpp"
#include "tests/scratch.hpp"

using namespace weft;
using namespace weft::interchange;
namespace fs = std::filesystem;

namespace {

struct Array {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  double at(std::int64_t i, std::int64_t j, std::int64_t k) const {
    return static_cast<double>(values[static_cast<std::size_t>((i * shape[1] + j) * shape[2] + k)]);
  }
};

Array array_of(const SafetensorsFile& file, const char* name) {
  const SafetensorsEntry* const entry = file.find(name);
  REQUIRE(entry != nullptr);
  Array array{entry->shape, std::vector<float>(static_cast<std::size_t>(entry->elements()))};
  file.read(*entry, 0, entry->elements(), array.values.data());
  return array;
}

/// Rows of a part: [rows][columns].
std::vector<std::vector<double>> rows_of(const RowSource& source, Part part, std::int64_t layer) {
  const Extent extent = extent_of(source.contents(), part, layer);
  std::vector<float> values(static_cast<std::size_t>(extent.rows * extent.columns));
  source.read(part, layer, {0, extent.rows}, values.data());
  std::vector<std::vector<double>> rows;
  for (std::int64_t i = 0; i < extent.rows; ++i)
    rows.emplace_back(values.begin() + i * extent.columns, values.begin() + (i + 1) * extent.columns);
  return rows;
}

double product(const std::vector<double>& row, const Array& x, std::int64_t layer, std::int64_t n) {
  double sum = 0;
  for (std::size_t j = 0; j < row.size(); ++j) sum += row[j] * x.at(layer, n, static_cast<std::int64_t>(j));
  return sum;
}

}  // namespace

TEST_CASE("files of circuit-tracer, SAELens and sparsify compute what these packages compute") {
  int compared = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(WEFT_INTERCHANGE_FIXTURES)) {
    if (!entry.is_directory()) continue;
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    const SafetensorsFile recorded((entry.path() / "expected.safetensors").string());
    const Array x = array_of(recorded, "x"), features = array_of(recorded, "features"), y = array_of(recorded, "y");
    const Opened opened = open_directory(entry.path());
    const RowSource& source = *opened.rows;
    const Contents& contents = source.contents();
    const auto [n_layers, d, n_features] = contents.sizes;
    REQUIRE(x.shape == std::vector<std::int64_t>{n_layers, x.shape[1], d});
    REQUIRE(features.shape[2] == n_features);
    const std::int64_t rows = x.shape[1];
    // Outputs by layer and row.
    std::vector<std::vector<std::vector<double>>> sums(static_cast<std::size_t>(n_layers));
    double worst = 0;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      auto& own = sums[static_cast<std::size_t>(s)];
      own.resize(static_cast<std::size_t>(rows));
      for (auto& row : own)
        for (const auto& value : rows_of(source, Part::decoder_bias, s)) row.push_back(value[0]);
      if (!contents.skip) continue;
      const auto skip = rows_of(source, Part::skip, s);
      for (std::int64_t n = 0; n < rows; ++n)
        for (std::int64_t i = 0; i < d; ++i)
          own[static_cast<std::size_t>(n)][static_cast<std::size_t>(i)] +=
              product(skip[static_cast<std::size_t>(i)], x, s, n);
    }
    for (std::int64_t s = 0; s < n_layers; ++s) {
      const auto encoder = rows_of(source, Part::encoder, s), bias = rows_of(source, Part::encoder_bias, s),
                 decoder = rows_of(source, Part::decoder, s),
                 theta = contents.thresholds ? rows_of(source, Part::threshold, s) : bias;
      for (std::int64_t n = 0; n < rows; ++n) {
        std::vector<double> z;
        for (std::size_t f = 0; f < encoder.size(); ++f) z.push_back(product(encoder[f], x, s, n) + bias[f][0]);
        std::vector<double> sorted = z;
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        for (std::size_t f = 0; f < z.size(); ++f) {
          const bool active = z[f] > 0 && (!contents.thresholds || z[f] > theta[f][0]) &&
                              (contents.k == 0 || z[f] >= sorted[static_cast<std::size_t>(contents.k - 1)]);
          const double a = active ? z[f] : 0;
          worst = std::max(worst, std::abs(a - features.at(s, n, static_cast<std::int64_t>(f))));
          for (std::size_t column = 0; column < decoder[f].size(); ++column)
            sums[static_cast<std::size_t>(s) + column / static_cast<std::size_t>(d)][static_cast<std::size_t>(n)]
                [column % static_cast<std::size_t>(d)] += a * decoder[f][column];
        }
      }
    }
    for (std::int64_t t = 0; t < n_layers; ++t)
      for (std::int64_t n = 0; n < rows; ++n)
        for (std::int64_t i = 0; i < d; ++i)
          worst = std::max(
              worst,
              std::abs(sums[static_cast<std::size_t>(t)][static_cast<std::size_t>(n)][static_cast<std::size_t>(i)] -
                       y.at(t, n, i)));
    // fp32 sums of about ten products of size 1; a tensor in the wrong place changes the first digit.
    CHECK(worst < 1e-5);
    ++compared;
  }
  CHECK(compared >= 12);
}

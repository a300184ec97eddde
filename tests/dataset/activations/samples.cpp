// SPDX-License-Identifier: Apache-2.0
#include "tests/dataset/activations/samples.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "storage/digest.hpp"
#include "tests/test.hpp"

namespace weft::testing {

float sample_value(std::int64_t global_row, bool target, std::int64_t column) {
  // At most 8 significant bits: exact in bf16. The first columns are the digits of the row in base 16.
  if (column < 5) return static_cast<float>((global_row >> (4 * column)) & 15) - 7.5f;
  return static_cast<float>((global_row * 5 + column * 3 + (target ? 1 : 0)) % 31) - 15.0f;
}

std::vector<std::byte> sample_row(const Sample& sample, std::int64_t global_row, bool target) {
  const std::int64_t n = sample.layers * sample.d_model;
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = sample_value(global_row, target, i);
  std::vector<std::byte> raw(static_cast<std::size_t>(n * kernels::bytes_of(sample.dtype)));
  dataset::store_as(sample.dtype, values.data(), n, raw.data());
  return raw;
}

void write_sample(const std::string& path, const Sample& sample) {
  world().on_root([&] {
    dataset::WriterSettings settings;
    settings.path = path;
    settings.n_layers = sample.layers;
    settings.d_model = sample.d_model;
    settings.dtype = sample.dtype;
    settings.compression = sample.compression;
    settings.rows_per_file = sample.rows_per_file.front();
    settings.model = "test/model";
    settings.hook_inputs = "mlp.in";
    settings.hook_targets = "mlp.out";
    dataset::ActivationWriter writer(settings);
    std::int64_t row = 0;
    for (const std::int64_t rows : sample.rows_per_file)
      for (std::int64_t i = 0; i < rows; ++i, ++row)
        writer.append(1, sample_row(sample, row, false).data(), sample_row(sample, row, true).data());
    writer.finish();
    return std::string();
  });
}

std::string file_digest(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return storage::sha256(std::string(std::istreambuf_iterator<char>(in), {}));
}

std::string digest_of(const std::string& directory) {
  std::vector<std::string> parts;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    parts.push_back(entry.path().string() + file_digest(entry.path().string()));
  }
  std::sort(parts.begin(), parts.end());
  std::string all;
  for (const std::string& part : parts) all += part;
  return storage::sha256(all);
}

}  // namespace weft::testing

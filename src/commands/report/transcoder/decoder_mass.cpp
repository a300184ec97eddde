// SPDX-License-Identifier: Apache-2.0
#include "commands/report/transcoder/decoder_mass.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "interchange/checkpoint.hpp"
#include "kernels/constants.hpp"
#include "storage/tensor_file.hpp"
#include "transcoder/model.hpp"

namespace weft::commands {
namespace {

using checkpoint::Manifest;
using checkpoint::TensorEntry;
using kernels::Scalar;

std::size_t index_of(const Manifest& manifest, const std::string& name) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].name == name) return i;
  return manifest.tensors.size();
}

/// Calls function(first_row, rows, bytes) for all rows of a tensor, a few MiB at a time.
template <class Function>
void for_each_piece(const checkpoint::Found& found, std::size_t tensor, Function&& function) {
  const TensorEntry& entry = found.manifest.tensors[tensor];
  std::vector<std::byte> rows;
  for (const checkpoint::ShardEntry& shard : found.manifest.shards) {
    const parallel::Range stored = shard.owned[tensor];
    if (stored.size() <= 0) continue;
    const storage::Handle file = storage::open_file(found.path / shard.file);
    std::vector<std::int64_t> shape = entry.shape;
    shape[0] = stored.size();
    const storage::Handle dataset = storage::open_dataset(file, entry.name, entry.type, shape);
    const std::int64_t row_bytes = checkpoint::bytes_of(entry) / entry.shape[0];
    const std::int64_t piece = std::min(stored.size(), storage::piece_rows(entry.type, shape));
    rows.resize(static_cast<std::size_t>(piece * row_bytes));
    for (std::int64_t begin = 0; begin < stored.size(); begin += piece) {
      const std::int64_t count = std::min(piece, stored.size() - begin);
      storage::read_rows(dataset, begin, count, rows.data());
      function(stored.begin + begin, count, static_cast<const std::byte*>(rows.data()));
    }
  }
}

/// By feature of layer s: 1 if it is live. All are when the checkpoint has no clocks.
std::vector<char> live_features(const checkpoint::Found& found, std::size_t layer, std::int64_t features,
                                std::int64_t dead_window) {
  std::vector<char> live(static_cast<std::size_t>(features), 1);
  const std::size_t clocks = index_of(found.manifest, fmt::format("encoder_{}/tokens_since_fired", layer));
  if (clocks == found.manifest.tensors.size()) return live;
  const TensorEntry& entry = found.manifest.tensors[clocks];
  if (entry.type != Scalar::i64 || entry.shape != std::vector<std::int64_t>{features}) return live;
  const std::int64_t window = dead_window > 0 ? std::min(dead_window, found.manifest.tokens) : found.manifest.tokens;
  for_each_piece(found, clocks, [&](std::int64_t first, std::int64_t count, const std::byte* bytes) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t silent;
      std::memcpy(&silent, bytes + 8 * i, 8);
      live[static_cast<std::size_t>(first + i)] = silent < window;
    }
  });
  return live;
}

}  // namespace

DecoderMass decoder_mass(const checkpoint::Found& found, const parallel::Communicator& alone,
                         std::int64_t dead_window) {
  const auto stored = transcoder::stored_model(found.manifest.tensors);
  if (!stored || stored->shape.n_layers > kernels::kMostLayers)
    throw error(ExitCode::data, "{}: it has {} layers of features (1 to {} can be drawn)", found.path.string(),
                stored ? stored->shape.n_layers : 0, kernels::kMostLayers);
  const transcoder::Shape& shape = stored->shape;
  const interchange::CheckpointRows rows(alone, found,
                                         {.sizes = {shape.n_layers, shape.d_model, shape.n_features},
                                          .per_layer = shape.decoder == transcoder::Decoder::per_layer});
  const auto n_layers = static_cast<std::size_t>(shape.n_layers);
  constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
  DecoderMass mass;
  mass.step = found.manifest.step;
  for (std::size_t s = 0; s < n_layers; ++s) {
    const auto layer = static_cast<std::int64_t>(s);
    const std::vector<char> live = live_features(found, s, shape.n_features, dead_window);
    const interchange::Extent extent = interchange::extent_of(rows.contents(), interchange::Part::decoder, layer);
    const auto targets = static_cast<std::size_t>(extent.columns / shape.d_model);
    const std::int64_t most = interchange::piece_rows(extent);
    std::vector<float> piece(static_cast<std::size_t>(std::min(most, extent.rows) * extent.columns));
    std::vector<double> sums(n_layers, 0.0);
    for (parallel::Range part{0, 0}; part.begin < extent.rows; part.begin = part.end) {
      part.end = std::min(part.begin + most, extent.rows);
      rows.read(interchange::Part::decoder, layer, part, piece.data());
      const float* value = piece.data();
      for (std::int64_t f = part.begin; f < part.end; ++f)
        for (std::size_t t = 0; t < targets; ++t, value += shape.d_model)
          if (live[static_cast<std::size_t>(f)])
            sums[s + t] += std::inner_product(value, value + shape.d_model, value, 0.0);
    }
    const std::int64_t counted = std::count(live.begin(), live.end(), 1);
    double total = 0;
    for (const double sum : sums) total += sum;
    std::vector<double> magnitude(n_layers, nothing), share(n_layers, nothing);
    for (std::size_t t = s; t < s + targets; ++t) {
      if (counted > 0) magnitude[t] = std::sqrt(sums[t] / static_cast<double>(counted));
      if (total > 0) share[t] = sums[t] / total;
    }
    mass.magnitude.push_back(std::move(magnitude));
    mass.share.push_back(std::move(share));
    mass.features.push_back(counted);
    mass.all_features.push_back(shape.n_features);
  }
  return mass;
}

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
#include "commands/report/transcoder/decoder_mass.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/bf16.hpp"
#include "kernels/constants.hpp"
#include "storage/tensor_file.hpp"

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

double squared_norm(Scalar type, const std::byte* bytes, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    float value;
    if (type == Scalar::fp32) {
      std::memcpy(&value, bytes + 4 * i, 4);
    } else {
      kernels::bf16 half;
      std::memcpy(&half.bits, bytes + 2 * i, 2);
      value = half;
    }
    sum += static_cast<double>(value) * static_cast<double>(value);
  }
  return sum;
}

/// The decoder of one source layer, as the manifest describes it.
struct Strip {
  std::size_t tensor = 0;
  std::int64_t features = 0;
  std::int64_t d_model = 0;
  std::int64_t targets = 0;  // blocks of d_model columns, for this layer and those after it
};

std::vector<Strip> strips_of(const checkpoint::Found& found) {
  const Manifest& manifest = found.manifest;
  std::vector<Strip> strips;
  while (strips.size() <= kernels::kMostLayers) {
    const std::size_t s = strips.size(), tied = index_of(manifest, fmt::format("decoder_{}/tied_weight", s)),
                      decoder = tied < manifest.tensors.size()
                                    ? tied
                                    : index_of(manifest, fmt::format("decoder_{}/weight", s)),
                      encoder = index_of(manifest, fmt::format("encoder_{}/weight", s));
    if (decoder == manifest.tensors.size() || encoder == manifest.tensors.size()) break;
    const std::vector<std::int64_t>&read = manifest.tensors[encoder].shape, &written = manifest.tensors[decoder].shape;
    const Scalar type = manifest.tensors[decoder].type;
    if (read.size() != 2 || written.size() != 2 || read[0] != written[0] || read[1] <= 0 || written[1] % read[1] != 0 ||
        (type != Scalar::fp32 && type != Scalar::bf16))
      throw error(ExitCode::data, "{}: decoder_{}/weight is not a row of blocks of the d_model of encoder_{}/weight",
                  found.path.string(), s, s);
    strips.push_back({decoder, written[0], read[1], written[1] / read[1]});
  }
  if (strips.empty() || strips.size() > kernels::kMostLayers)
    throw error(ExitCode::data, "{}: it has {} decoders (1 to {} can be drawn)", found.path.string(),
                strips.empty() ? "no" : "too many", kernels::kMostLayers);
  for (std::size_t s = 0; s < strips.size(); ++s)
    if (strips[s].targets < 1 || strips[s].targets > static_cast<std::int64_t>(strips.size() - s))
      throw error(ExitCode::data, "{}: decoder_{}/weight writes to {} layers of {}", found.path.string(), s,
                  strips[s].targets, strips.size() - s);
  return strips;
}

}  // namespace

DecoderMass decoder_mass(const checkpoint::Found& found, std::int64_t dead_window) {
  const std::vector<Strip> strips = strips_of(found);
  const std::size_t n_layers = strips.size();
  constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
  DecoderMass mass;
  mass.step = found.manifest.step;
  for (std::size_t s = 0; s < n_layers; ++s) {
    const Strip& strip = strips[s];
    const Scalar type = found.manifest.tensors[strip.tensor].type;
    const std::vector<char> live = live_features(found, s, strip.features, dead_window);
    const std::int64_t block_bytes = strip.d_model * kernels::bytes_of(type);
    std::vector<double> sums(n_layers, 0.0);
    for_each_piece(found, strip.tensor, [&](std::int64_t first, std::int64_t count, const std::byte* bytes) {
      for (std::int64_t row = 0; row < count; ++row) {
        if (!live[static_cast<std::size_t>(first + row)]) continue;
        for (std::int64_t block = 0; block < strip.targets; ++block)
          sums[s + static_cast<std::size_t>(block)] +=
              squared_norm(type, bytes + (row * strip.targets + block) * block_bytes, strip.d_model);
      }
    });
    const std::int64_t counted = std::count(live.begin(), live.end(), 1);
    double total = 0;
    for (const double sum : sums) total += sum;
    std::vector<double> magnitude(n_layers, nothing), share(n_layers, nothing);
    for (std::size_t t = s; t < s + static_cast<std::size_t>(strip.targets); ++t) {
      if (counted > 0) magnitude[t] = std::sqrt(sums[t] / static_cast<double>(counted));
      if (total > 0) share[t] = sums[t] / total;
    }
    mass.magnitude.push_back(std::move(magnitude));
    mass.share.push_back(std::move(share));
    mass.features.push_back(counted);
    mass.all_features.push_back(strip.features);
  }
  return mass;
}

}  // namespace weft::commands

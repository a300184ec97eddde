// SPDX-License-Identifier: Apache-2.0
#include "interchange/checkpoint.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

#include "checkpoint/registry.hpp"
#include "checkpoint/shard.hpp"
#include "kernels/bf16.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

using checkpoint::TensorEntry;
using kernels::Scalar;

/// Name of a part's tensor. A tied decoder has a separate name, as in a trained checkpoint.
std::string name_of(const Contents& contents, Part part, std::int64_t layer) {
  switch (part) {
    case Part::encoder:
      return fmt::format("encoder_{}/weight", layer);
    case Part::encoder_bias:
      return fmt::format("encoder_{}/bias", layer);
    case Part::threshold:
      return fmt::format("encoder_{}/threshold", layer);
    case Part::decoder:
      return fmt::format("decoder_{}/{}", layer,
                         contents.tying == Tying::per_source   ? "tied_weight"
                         : contents.tying == Tying::per_target ? "target_weight"
                                                               : "weight");
    case Part::decoder_bias:
      return "decoder_bias";  // one tensor with all layers, one after the other
    case Part::skip:
      return fmt::format("skip_{}/weight", layer);
    case Part::offset:
    case Part::scale:
      break;  // named by pair of layers: affine_name
  }
  return {};
}

std::string affine_name(Part part, std::int64_t source, std::int64_t target) {
  return fmt::format("decoder_{}/{}_{}", source, part == Part::offset ? "offset" : "scale", target);
}

const TensorEntry* find(const checkpoint::Manifest& manifest, const std::string& name) {
  const auto at = std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                               [&](const TensorEntry& tensor) { return tensor.name == name; });
  return at == manifest.tensors.end() ? nullptr : &*at;
}

/// A tensor of the registry whose rows `fill` produces when they are written.
checkpoint::Tensor produced(std::string name, Scalar type, std::vector<std::int64_t> shape,
                            std::function<void(parallel::Range, void*)> fill) {
  const parallel::Range all{0, shape[0]};
  return {.name = std::move(name),
          .type = type,
          .shape = std::move(shape),
          .held = all,
          .owned = all,
          .gather = std::move(fill),
          .scatter = [](parallel::Range, const void*) { throw error(ExitCode::internal, "an import is not read"); }};
}

}  // namespace

CheckpointRows::CheckpointRows(const parallel::Communicator& alone, const checkpoint::Found& found,
                               const Contents& contents)
    : alone_(alone), found_(found) {
  contents_ = {.sizes = contents.sizes,
               .thresholds = find(found.manifest, name_of(contents, Part::threshold, 0)) != nullptr,
               .skip = find(found.manifest, name_of(contents, Part::skip, 0)) != nullptr,
               .per_layer = contents.per_layer,
               .tying = contents.tying,
               .affine = contents.affine,
               .autoencoder = contents.autoencoder,
               .k = contents.k};
}

void CheckpointRows::read(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  const std::int64_t columns = extent_of(contents_, part, layer).columns, d = contents_.sizes.d_model;
  if (part == Part::decoder_bias)
    read_rows(name_of(contents_, part, layer), {layer * d + rows.begin, layer * d + rows.end}, 1, to);
  else if (is_affine(part))
    read_affine(part, layer, rows, to);
  else if (part != Part::decoder || contents_.tying != Tying::none)
    read_rows(name_of(contents_, part, layer), rows, columns, to);
  else
    read_decoder(layer, rows, columns, to);
}

/// Reads offsets or scales. The checkpoint has one vector for each source layer; these must be equal.
void CheckpointRows::read_affine(Part part, std::int64_t target, parallel::Range rows, float* to) const {
  read_rows(affine_name(part, target, target), rows, 1, to);
  std::vector<float> other(static_cast<std::size_t>(rows.size()));
  for (std::int64_t source = 0; source < target; ++source) {
    read_rows(affine_name(part, source, target), rows, 1, other.data());
    if (!std::equal(other.begin(), other.end(), to))
      throw error(ExitCode::usage,
                  "{}: {} and {} differ (the format has one of each target, whatever the source layer); train with "
                  "transcoder.decoder_affine = false to export",
                  found_.path.string(), affine_name(part, source, target), affine_name(part, target, target));
  }
}

/// Reads the vectors of all targets, one after the other, for any kind of stored decoder (transcoder.decoder).
void CheckpointRows::read_decoder(std::int64_t layer, parallel::Range rows, std::int64_t columns, float* to) const {
  const std::int64_t d = contents_.sizes.d_model, targets = columns / d;
  const auto entry = [&](const char* matrix) {
    return find(found_.manifest, fmt::format("decoder_{}/{}", layer, matrix));
  };
  const auto copy = [&](const std::vector<float>& vectors, std::int64_t target) {
    for (std::int64_t i = 0; i < rows.size(); ++i)
      std::copy_n(vectors.data() + i * d, d, to + i * columns + target * d);
  };
  std::vector<float> vectors(static_cast<std::size_t>(rows.size() * d));
  if (entry("tied_weight") != nullptr) {
    read_rows(fmt::format("decoder_{}/tied_weight", layer), rows, d, vectors.data());
    for (std::int64_t t = 0; t < targets; ++t) copy(vectors, t);
  } else if (entry("target_weight") != nullptr) {
    for (std::int64_t t = 0; t < targets; ++t) {
      read_rows(fmt::format("decoder_{}/target_weight", layer + t), rows, d, vectors.data());
      if (const TensorEntry* const scale = entry(fmt::format("scale_{}", layer + t).c_str()); scale != nullptr) {
        std::vector<float> scales(static_cast<std::size_t>(rows.size()));
        read_rows(scale->name, rows, 1, scales.data());
        for (std::size_t i = 0; i < vectors.size(); ++i) vectors[i] *= scales[i / static_cast<std::size_t>(d)];
      }
      copy(vectors, t);
    }
  } else if (const TensorEntry* const stored = entry("weight");
             stored != nullptr && targets > 1 && stored->shape.size() == 2 && stored->shape[1] == d) {
    // All strips are requested; a per-layer transcoder has only the strip of its own layer.
    read_rows(stored->name, rows, d, vectors.data());
    std::fill_n(to, rows.size() * columns, 0.0f);
    copy(vectors, 0);
  } else {
    read_rows(name_of(contents_, Part::decoder, layer), rows, columns, to);
  }
}

void CheckpointRows::read_rows(const std::string& name, parallel::Range rows, std::int64_t columns, float* to) const {
  const TensorEntry* const entry = find(found_.manifest, name);
  if (entry == nullptr)
    throw error(ExitCode::usage, "{}: has no tensor {} (is it a transcoder?)", found_.path.string(), name);
  std::int64_t stored_columns = 1;
  for (std::size_t axis = 1; axis < entry->shape.size(); ++axis) stored_columns *= entry->shape[axis];
  if (stored_columns != columns || entry->shape.empty() || entry->shape[0] < rows.end ||
      (entry->type != Scalar::fp32 && entry->type != Scalar::bf16))
    throw error(ExitCode::usage, "{}: tensor {} has an unexpected shape or type (is it a cross-layer transcoder?)",
                found_.path.string(), name);
  std::vector<kernels::bf16> half(entry->type == Scalar::bf16 ? static_cast<std::size_t>(rows.size() * columns)
                                                              : std::size_t{0});
  checkpoint::Registry registry;
  registry.add({.name = name,
                .type = entry->type,
                .shape = entry->shape,
                .held = rows,
                .owned = rows,
                .data = half.empty() ? static_cast<void*>(to) : half.data()});
  checkpoint::load(alone_, found_, registry, {}, checkpoint::Load::part);
  std::copy(half.begin(), half.end(), to);
}

Normalised not_normalised(const Sizes& sizes) {
  Normalised result;
  result.statistics.n_rows = 1;
  for (dataset::SideStatistics* side : {&result.statistics.inputs, &result.statistics.targets}) {
    const auto width = static_cast<std::size_t>(sizes.n_layers * sizes.d_model);
    *side = {std::vector<double>(width, 0.0), std::vector<double>(width, 1.0),
             std::vector<double>(static_cast<std::size_t>(sizes.n_layers), 1.0)};
  }
  return result;
}

void write_checkpoint(const RowSource& source, const Normalised& normalised, checkpoint::Manifest manifest,
                      const fs::path& directory) {
  const Contents& contents = source.contents();
  const Sizes& sizes = contents.sizes;
  checkpoint::Registry registry;
  // The last piece that was read of a part is kept: a shard requests fewer rows at a time, and a transposed part is
  // slow to read in small pieces.
  struct Piece {
    std::string name;
    parallel::Range rows;
    std::vector<float> values;
  } piece;
  const auto read = [&](Part part, std::int64_t layer, parallel::Range rows, void* to) {
    const Extent extent = extent_of(contents, part, layer);
    const std::string name =
        fmt::format("{} {}", is_affine(part) ? affine_name(part, layer, layer) : name_of(contents, part, layer), layer);
    auto* at = static_cast<float*>(to);
    while (rows.size() > 0) {
      if (piece.name != name || rows.begin < piece.rows.begin || rows.begin >= piece.rows.end) {
        piece.name.clear();
        piece.rows = {rows.begin, std::min(extent.rows, rows.begin + piece_rows(extent))};
        piece.values.resize(static_cast<std::size_t>(piece.rows.size() * extent.columns));
        source.read(part, layer, piece.rows, piece.values.data());
        if (part == Part::threshold)
          for (std::size_t i = 0; i < piece.values.size(); ++i)
            if (piece.values[i] < 0)
              throw error(
                  ExitCode::usage,
                  "the threshold of feature {} of layer {} is {} (Weft's features are active only where they are "
                  "positive); raise it to 0 if that is what is meant",
                  piece.rows.begin + static_cast<std::int64_t>(i), layer, piece.values[i]);
        piece.name = name;
      }
      const parallel::Range both = intersection(rows, piece.rows);
      at = std::copy_n(piece.values.data() + (both.begin - piece.rows.begin) * extent.columns,
                       both.size() * extent.columns, at);
      rows.begin = both.end;
    }
  };
  for (const auto& [part, layer] : parts_of(contents)) {
    if (part == Part::decoder_bias) continue;  // one tensor for all layers, added below
    const Extent extent = extent_of(contents, part, layer);
    const auto fill = [&read, part = part, layer = layer](parallel::Range rows, void* to) {
      read(part, layer, rows, to);
    };
    if (is_affine(part)) {
      for (std::int64_t source = 0; source <= layer; ++source)
        registry.add(produced(affine_name(part, source, layer), Scalar::fp32, {extent.rows}, fill));
      continue;
    }
    std::vector<std::int64_t> shape{extent.rows};
    if (part == Part::encoder || part == Part::decoder || part == Part::skip) shape.push_back(extent.columns);
    registry.add(produced(name_of(contents, part, layer), Scalar::fp32, std::move(shape), fill));
    if (part == Part::encoder_bias)
      registry.add(produced(fmt::format("encoder_{}/tokens_since_fired", layer), Scalar::i64, {extent.rows},
                            [](parallel::Range rows, void* to) {
                              std::memset(to, 0, static_cast<std::size_t>(rows.size()) * sizeof(std::int64_t));
                            }));
  }
  registry.add(produced(
      name_of(contents, Part::decoder_bias, 0), Scalar::fp32, {sizes.n_layers * sizes.d_model},
      [&](parallel::Range rows, void* to) {
        auto* at = static_cast<float*>(to);
        for (std::int64_t layer = 0; layer < sizes.n_layers; ++layer) {
          const std::int64_t first = layer * sizes.d_model;
          const parallel::Range both = intersection(rows, {first, first + sizes.d_model});
          if (both.size() > 0)
            read(Part::decoder_bias, layer, {both.begin - first, both.end - first}, at + (both.begin - rows.begin));
        }
      }));
  dataset::Statistics statistics = normalised.statistics;
  const auto add = [&](const std::string& name, Scalar type, std::int64_t size, void* data) {
    registry.add({.name = "statistics/" + name,
                  .type = type,
                  .shape = {size},
                  .held = {0, size},
                  .owned = {0, size},
                  .data = data});
  };
  add("rows", Scalar::i64, 1, &statistics.n_rows);
  for (const auto& [side, values] : {std::pair<const char*, dataset::SideStatistics*>{"inputs", &statistics.inputs},
                                     {"targets", &statistics.targets}})
    for (const auto& [name, vector] : {std::pair<const char*, std::vector<double>*>{"mean", &values->mean},
                                       {"standard_deviation", &values->standard_deviation},
                                       {"mean_norm", &values->mean_norm}})
      add(fmt::format("{}_{}", side, name), Scalar::fp64, static_cast<std::int64_t>(vector->size()), vector->data());

  manifest.world = 1;
  manifest.grid = {{std::string(parallel::kDataAxis), 1}, {std::string(parallel::kFeatureAxis), 1}};
  manifest.cursor = {{"epoch", 0}, {"position", 0}};
  checkpoint::ShardEntry shard;
  shard.file = checkpoint::shard_name(0);
  for (const checkpoint::Tensor& tensor : registry.tensors()) {
    manifest.tensors.push_back({tensor.name, tensor.type, tensor.shape});
    shard.owned.push_back(tensor.owned);
  }
  storage::write_new_directory(directory, [&](const fs::path& temporary) {
    std::vector<std::byte> rows_of_piece;
    constexpr int kOneThread = 1;  // memory is that of one piece
    const checkpoint::Shard written = checkpoint::write_shard(
        temporary / shard.file, 0, manifest, registry,
        [&](std::size_t index, parallel::Range rows) -> const void* {
          const checkpoint::Tensor& tensor = registry.tensors()[index];
          if (!tensor.gather) return static_cast<const char*>(tensor.data) + rows.begin * tensor.row_bytes();
          rows_of_piece.resize(static_cast<std::size_t>(rows.size() * tensor.row_bytes()));
          tensor.gather(rows, rows_of_piece.data());
          return rows_of_piece.data();
        },
        kOneThread);
    shard.bytes = written.bytes;
    shard.sha256 = written.sha256;
    manifest.shards = {shard};
    storage::write_text(temporary / checkpoint::kManifestName, checkpoint::to_text(manifest));
  });
}

}  // namespace weft::interchange

// SPDX-License-Identifier: Apache-2.0
#include "interchange/compressed_activations.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "base/json.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "dataset/activations/activation_writer.hpp"
#include "interchange/formats.hpp"
#include "kernels/bf16.hpp"
#include "storage/compressed_stream.hpp"
#include "storage/pending_output.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

using kernels::Scalar;
using storage::CompressedStream;
using storage::Compression;

constexpr std::int64_t kLargestMetadata = std::int64_t{1} << 20, kMostItems = 64, kLongestName = 256;
/// Approximate number of values that are unpacked at a time. A piece has a multiple of four rows, so that it begins at
/// a byte.
constexpr std::int64_t kPieceValues = std::int64_t{1} << 22;
constexpr std::int64_t kMostRows = std::int64_t{1} << 38;

/// Numbers in a file name: "activations_ctx_16_split_3.bin" -> {16, 3}.
struct Name {
  std::int64_t context = 0, split = 0;
};
std::optional<Name> parsed(std::string_view text) {
  Name name;
  const auto number = [&](std::string_view before, std::int64_t& value) {
    if (!text.starts_with(before)) return false;
    text.remove_prefix(before.size());
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (status != std::errc() || value < 0) return false;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return true;
  };
  if (!number("activations_ctx_", name.context) || !number("_split_", name.split) || text != ".bin")
    return std::nullopt;
  return name;
}

struct Item {
  std::int64_t begin = 0, bytes = 0;
};

/// An opened file: its checked metadata and the positions of its items.
struct CacheFile {
  std::string path;
  storage::PosixFile file;
  SortedJson metadata;
  std::map<std::string, Item> items = {};
  Sizes sizes = {};  // without features
  std::int64_t rows = 0;
  int bits = 0;  // bits of a stored value; 16: fp16
  Compression compression = Compression::none;
  Scalar type = Scalar::fp32;  // type of the values before quantisation
  bool tokens = false;

  explicit CacheFile(const std::string& name) : path(name), file(existing(name)) {
    read_items();
    const std::string quantization = text("quantization"), packed = text("compression");
    const std::map<std::string, int> widths = {{"none", 16}, {"int8", 8}, {"int4", 4}, {"int2", 2}};
    if (!widths.contains(quantization)) refuse("quantization", "is not none, int8, int4 or int2");
    bits = widths.at(quantization);
    if (packed != "none" && packed != "zstd" && packed != "lz4") refuse("compression", "is not none, zstd or lz4");
    compression = packed == "zstd" ? Compression::zstd : packed == "lz4" ? Compression::lz4 : Compression::none;
    if (const auto symmetric = metadata.find("symmetric");
        bits < 16 && (symmetric == metadata.end() || !symmetric->is_boolean() || !symmetric->get<bool>()))
      throw error(ExitCode::usage,
                  "{}: its values are quantised asymmetrically (the program that writes such files does not read them "
                  "back correctly); write the cache again with symmetric quantisation",
                  path);
    const std::vector<std::int64_t> shape = shape_of("original_shape_in", 3), out = shape_of("original_shape_out", 3);
    if (shape.size() != 3 || shape != out)
      refuse("original_shape_in", "is not [rows, layers, d], the same as original_shape_out");
    rows = shape[0];
    sizes = checked(path, shape[1], shape[2], 1);
    if (row_values() > kPieceValues)
      throw error(ExitCode::data, "{}: has {} layers of {} values (at most {} together are accepted)", path, shape[1],
                  shape[2], kPieceValues);
    if (rows < 1 || rows > kMostRows) refuse("original_shape_in", "has an unusable number of rows");
    const std::string dtype = text("original_dtype");
    if (dtype == "torch.float32")
      type = Scalar::fp32;
    else if (dtype == "torch.float16")
      type = Scalar::fp16;
    else if (dtype == "torch.bfloat16")
      type = Scalar::bf16;
    else
      refuse("original_dtype", "is not torch.float32, torch.float16 or torch.bfloat16");
    const auto has = metadata.find("has_tokens");
    tokens = has != metadata.end() && has->is_boolean() && has->get<bool>();
    if (compression != Compression::none) return;
    for (const auto& [item, bytes] :
         {std::pair<const char*, std::int64_t>{"act_in_data", value_bytes(rows)}, {"act_out_data", value_bytes(rows)}})
      if (find(item).bytes != bytes)
        throw error(ExitCode::data, "{}: item \"{}\" has {} bytes, its shape requires {}; is the file damaged?", path,
                    item, find(item).bytes, bytes);
  }

  std::int64_t row_values() const { return sizes.n_layers * sizes.d_model; }
  /// Bytes of the stored values of `n` rows from a multiple of four rows on.
  std::int64_t value_bytes(std::int64_t n) const { return (n * row_values() * bits + 7) / 8; }

  const Item& find(const std::string& name) const {
    const auto at = items.find(name);
    if (at == items.end())
      throw error(ExitCode::data, "{}: item \"{}\" is missing; was the file written completely?", path, name);
    return at->second;
  }
  CompressedStream stream(const std::string& name) const {
    const Item& item = find(name);
    return {file, fmt::format("{}: item \"{}\"", path, name), item.begin, item.bytes, compression};
  }

  /// Returns the scale of each layer.
  std::vector<float> scales(const char* side) const {
    const std::string name = fmt::format("act_{}_scale", side);
    const std::vector<std::int64_t> shape = shape_of(fmt::format("scale_shape_{}", side), 3);
    const bool per_layer = shape == std::vector<std::int64_t>{1, sizes.n_layers, 1};
    if (!per_layer && std::any_of(shape.begin(), shape.end(), [](std::int64_t extent) { return extent != 1; }))
      throw error(ExitCode::data, "{}: scale_shape_{} is neither one number nor one per layer", path, side);
    std::vector<float> stored(static_cast<std::size_t>(per_layer ? sizes.n_layers : 1));
    CompressedStream values = stream(name);
    values.read(stored.data(), static_cast<std::int64_t>(stored.size()) * 4);
    values.require_end();
    for (const float scale : stored)
      if (!(scale > 0) || !std::isfinite(scale))
        throw error(ExitCode::data, "{}: item \"{}\" has a scale that is not positive; is the file damaged?", path,
                    name);
    stored.resize(static_cast<std::size_t>(sizes.n_layers), stored[0]);
    return stored;
  }

 private:
  static const std::string& existing(const std::string& name) {
    open_regular(name, ExitCode::data);
    return name;
  }
  [[noreturn]] void refuse(const char* key, const char* why) const {
    throw error(ExitCode::data, "{}: \"{}\" of its metadata {}; is the file damaged?", path, key, why);
  }
  std::string text(const char* key) const {
    const auto at = metadata.find(key);
    return at != metadata.end() && at->is_string() ? at->get<std::string>() : "";
  }
  /// Returns a list of at most `most` sizes; empty if it is missing or of another type.
  std::vector<std::int64_t> shape_of(const std::string& key, std::size_t most) const {
    const auto at = metadata.find(key);
    if (at == metadata.end() || !at->is_array() || at->size() > most) return {};
    std::vector<std::int64_t> shape;
    for (const SortedJson& extent : *at) {
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > static_cast<std::uint64_t>(kMostRows))
        return {0};
      shape.push_back(extent.get<std::int64_t>());
    }
    return shape;
  }

  void read_items() {
    std::int64_t at = 0;
    const auto take = [&](void* to, std::int64_t bytes) {
      if (bytes > file.bytes() - at)
        throw error(ExitCode::data, "{}: ends at byte {}, inside its headers; was it copied completely?", path,
                    file.bytes());
      file.read(to, bytes, at);
      at += bytes;
    };
    const auto number = [&](std::int64_t most, const char* what) {
      std::uint32_t value = 0;
      take(&value, 4);
      if (value > static_cast<std::uint64_t>(most))
        throw error(ExitCode::data, "{}: {} at byte {} is {} (at most {} are accepted); is it a compressed cache?",
                    path, what, at - 4, value, most);
      return static_cast<std::size_t>(value);
    };
    std::string json(number(kLargestMetadata, "the length of the metadata"), '\0');
    take(json.data(), static_cast<std::int64_t>(json.size()));
    metadata = parse_json<SortedJson>(json);
    if (metadata.is_discarded() || !metadata.is_object())
      throw error(ExitCode::data, "{}: its metadata are not a JSON object; is it a compressed cache?", path);
    const std::size_t n = number(kMostItems, "the number of items");
    for (std::size_t i = 0; i < n; ++i) {
      std::string name(number(kLongestName, "the length of an item's name"), '\0');
      take(name.data(), static_cast<std::int64_t>(name.size()));
      std::uint64_t bytes = 0;
      take(&bytes, 8);
      if (bytes > static_cast<std::uint64_t>(file.bytes() - at))
        throw error(ExitCode::data, "{}: item \"{}\" claims {} bytes, {} are left; was the file copied completely?",
                    path, printable(name), bytes, file.bytes() - at);
      if (!items.emplace(name, Item{at, static_cast<std::int64_t>(bytes)}).second)
        throw error(ExitCode::data, "{}: has item \"{}\" twice; is the file damaged?", path, printable(name));
      at += static_cast<std::int64_t>(bytes);
    }
    if (at != file.bytes())
      throw error(ExitCode::data, "{}: its items end at byte {}, the file has {} bytes; is it damaged?", path, at,
                  file.bytes());
  }
};

/// Converts integers of `bits` bits (16: fp16) to values, [n, layers, d].
void dequantise(int bits, const std::byte* stored, std::span<const float> scales, std::int64_t n, std::int64_t d,
                float* values) {
  const auto n_layers = static_cast<std::int64_t>(scales.size());
  std::int64_t i = 0;
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t layer = 0; layer < n_layers; ++layer)
      for (std::int64_t j = 0; j < d; ++j, ++i) {
        float value = 0;
        if (bits == 16) {
          kernels::half half;
          std::memcpy(&half, stored + 2 * i, 2);
          value = static_cast<float>(half);
        } else if (bits == 8) {
          value = static_cast<float>(static_cast<signed char>(stored[i]));
        } else if (bits == 4) {
          value =
              static_cast<float>(static_cast<int>(std::to_integer<unsigned>(stored[i / 2]) >> (i % 2 * 4) & 15u) - 8);
        } else {
          value = static_cast<float>(
              static_cast<int>(std::to_integer<unsigned>(stored[i / 4]) >> (6 - i % 4 * 2) & 3u) - 2);
        }
        values[i] = value * scales[static_cast<std::size_t>(layer)];
      }
}

void append(const CacheFile& cache, std::int64_t context, dataset::ActivationWriter& writer) {
  const std::int64_t row_values = cache.row_values(),
                     most = std::max<std::int64_t>(4, kPieceValues / row_values / 4 * 4);
  const std::int64_t piece = std::min(cache.rows, most), row_bytes = row_values * kernels::bytes_of(cache.type);
  struct Side {
    CompressedStream stream;
    std::vector<float> scales;
    std::vector<std::byte> raw = {};
  };
  Side sides[2] = {{cache.stream("act_in_data"), cache.scales("in")},
                   {cache.stream("act_out_data"), cache.scales("out")}};
  std::optional<CompressedStream> tokens;
  if (cache.tokens) tokens.emplace(cache.stream("tokens"));
  // If the file has fewer rows than it claims, the first read ends with an error; no more than a piece is allocated.
  std::vector<std::byte> stored(static_cast<std::size_t>(cache.value_bytes(piece)));
  std::vector<float> values(static_cast<std::size_t>(piece * row_values));
  std::vector<std::int64_t> wide;
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> texts;
  for (std::int64_t begin = 0; begin < cache.rows; begin += piece) {
    const std::int64_t n = std::min(piece, cache.rows - begin);
    for (Side& side : sides) {
      side.stream.read(stored.data(), cache.value_bytes(n));
      dequantise(cache.bits, stored.data(), side.scales, n, cache.sizes.d_model, values.data());
      side.raw.resize(static_cast<std::size_t>(n * row_bytes));
      dataset::store_as(cache.type, values.data(), n * row_values, side.raw.data());
      for (std::int64_t i = 0; i < n * row_values; ++i)
        if (!std::isfinite(values[static_cast<std::size_t>(i)]))
          throw error(ExitCode::data, "{}: item \"{}\" row {}, layer {} is not finite; is the file damaged?",
                      cache.path, &side == sides ? "act_in_data" : "act_out_data", begin + i / row_values,
                      i % row_values / cache.sizes.d_model);
    }
    texts.clear();
    if (tokens) {
      wide.resize(static_cast<std::size_t>(n));
      ids.resize(wide.size());
      tokens->read(wide.data(), 8 * n);
      for (std::size_t i = 0; i < wide.size(); ++i) {
        const std::int64_t row = begin + static_cast<std::int64_t>(i);
        if (wide[i] < 0 || wide[i] > std::numeric_limits<std::int32_t>::max())
          throw error(ExitCode::data, "{}: item \"tokens\" row {} is {} (ids are not negative and have 31 bits)",
                      cache.path, row, wide[i]);
        ids[i] = static_cast<std::int32_t>(wide[i]);
        if (row == 0 || (context > 0 && row % context == 0)) texts.push_back(static_cast<std::int64_t>(i));
      }
    }
    writer.append(n, sides[0].raw.data(), sides[1].raw.data(), ids, texts);
    note_progress();
  }
  for (Side& side : sides) side.stream.require_end();
  if (tokens) tokens->require_end();
}

/// Returns the files by split; empty if there is none.
std::map<std::int64_t, std::pair<Name, std::string>> splits_in(const fs::path& directory) {
  std::map<std::int64_t, std::pair<Name, std::string>> found;
  std::error_code failure;
  for (fs::directory_iterator entry(directory, failure), end; !failure && entry != end; entry.increment(failure))
    if (const auto name = parsed(entry->path().filename().string())) {
      const auto [at, fresh] = found.emplace(name->split, std::pair(*name, entry->path().string()));
      if (!fresh)
        throw error(ExitCode::data, "{} and {} are both split {}; remove one of them", at->second.second,
                    entry->path().string(), name->split);
    }
  return found;
}

}  // namespace

bool is_compressed_cache(const fs::path& directory) { return !splits_in(directory).empty(); }

ConvertedActivations convert_cache(const fs::path& directory, const fs::path& output) {
  const auto splits = splits_in(directory);
  storage::PendingOutput pending(output, storage::PendingOutput::Kind::directory,
                                 {"chunk_0.hdf5", "index.bin", "metadata.json"});
  std::optional<dataset::ActivationWriter> writer;
  ConvertedActivations converted;
  Scalar type = Scalar::fp32;
  bool tokens = false;
  for (const auto& [number, split] : splits) {
    const CacheFile cache(split.second);
    if (number != converted.files)
      throw error(ExitCode::data, "{}: split {} is missing ({} exists); was the cache copied completely?",
                  directory.string(), converted.files, split.second);
    if (!writer) {
      type = cache.type;
      tokens = cache.tokens;
      converted.n_layers = cache.sizes.n_layers;
      converted.d_model = cache.sizes.d_model;
      converted.stored = fmt::format("{}, {}", cache.bits == 16 ? "fp16" : fmt::format("int{}", cache.bits),
                                     storage::name_of(cache.compression));
      writer.emplace(dataset::WriterSettings{.path = pending.place().string(),
                                             .n_layers = cache.sizes.n_layers,
                                             .d_model = cache.sizes.d_model,
                                             .dtype = type,
                                             .model = "",
                                             .hook_inputs = "ln2.hook_normalized",
                                             .hook_targets = "hook_mlp_out",
                                             .dataset = directory.string(),
                                             .split = "",
                                             .tokens = tokens});
    }
    if (cache.sizes.n_layers != converted.n_layers || cache.sizes.d_model != converted.d_model || cache.type != type ||
        cache.tokens != tokens)
      throw error(ExitCode::data,
                  "{}: has other layers, another width, another type or other tokens than split 0; were two caches "
                  "mixed?",
                  cache.path);
    append(cache, split.first.context, *writer);
    converted.rows += cache.rows;
    ++converted.files;
  }
  if (!writer) throw error(ExitCode::usage, "{}: has no activations_ctx_*_split_*.bin", directory.string());
  writer->finish();
  pending.publish();
  return converted;
}

}  // namespace weft::interchange

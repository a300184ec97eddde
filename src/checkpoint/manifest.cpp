// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/manifest.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/registry.hpp"
#include "storage/digest.hpp"

namespace weft::checkpoint {
namespace {

using json = SortedJson;

// The first two lines of a manifest of every version.
constexpr std::string_view kFormatLine = "{\n  \"format\": \"weft-checkpoint\",\n";
constexpr std::string_view kDigestLine = "  \"sha256\": \"";
constexpr std::size_t kDigestAt = kFormatLine.size() + kDigestLine.size();
constexpr std::size_t kDigestDigits = 64;

// Far above every real size; two of them can be added without overflow.
constexpr std::int64_t kLargest = std::int64_t{1} << 61;
constexpr std::size_t kMostAxes = 8;
// Entries of the maps `grid` and `cursor`, and characters of their names.
constexpr std::size_t kMostEntries = 64;
constexpr std::size_t kLongestEntry = 64;

constexpr std::pair<kernels::Scalar, std::string_view> kScalars[] = {
    {kernels::Scalar::fp32, "fp32"}, {kernels::Scalar::fp16, "fp16"}, {kernels::Scalar::bf16, "bf16"},
    {kernels::Scalar::fp64, "fp64"}, {kernels::Scalar::u8, "u8"},     {kernels::Scalar::u16, "u16"},
    {kernels::Scalar::i16, "i16"},   {kernels::Scalar::i32, "i32"},   {kernels::Scalar::i64, "i64"},
    {kernels::Scalar::u32, "u32"},   {kernels::Scalar::u64, "u64"}};

// --- reading -------------------------------------------------------------------------------------------------------

const json& member(const json& object, const char* key) {
  if (!object.is_object()) throw error(ExitCode::io, "\"{}\" is expected in something that is not an object", key);
  const auto at = object.find(key);
  if (at == object.end()) throw error(ExitCode::io, "\"{}\" is missing", key);
  return *at;
}

std::int64_t integer(const json& value, const char* key, std::int64_t least, std::int64_t most = kLargest) {
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(kLargest)))
    throw error(ExitCode::io, "\"{}\" is not an integer in range", key);
  const std::int64_t number = value.get<std::int64_t>();
  if (number < least || number > most)
    throw error(ExitCode::io, "\"{}\" is {}, outside {} to {}", key, number, least, most);
  return number;
}

std::string text(const json& value, const char* key) {
  if (!value.is_string()) throw error(ExitCode::io, "\"{}\" is not a string", key);
  return value.get<std::string>();
}

const json& array(const json& value, const char* key) {
  if (!value.is_array()) throw error(ExitCode::io, "\"{}\" is not a list", key);
  return value;
}

/// A map of names to integers from `least` to `most`, both within the bounds above.
std::map<std::string, std::int64_t> numbers_of(const json& value, const char* key, std::int64_t least,
                                               std::int64_t most = kLargest) {
  if (!value.is_object()) throw error(ExitCode::io, "\"{}\" is not an object", key);
  if (value.size() > kMostEntries)
    throw error(ExitCode::io, "\"{}\" has {} entries (at most {})", key, value.size(), kMostEntries);
  std::map<std::string, std::int64_t> numbers;
  for (const auto& [name, number] : value.items()) {
    if (!usable_name(name) || name.size() > kLongestEntry)
      throw error(ExitCode::io, "an entry of \"{}\" has an unusable name", key);
    numbers[name] = integer(number, name.c_str(), least, most);
  }
  return numbers;
}

TensorEntry tensor_of(const json& value) {
  TensorEntry tensor;
  tensor.name = text(member(value, "name"), "name");
  if (!usable_name(tensor.name)) throw error(ExitCode::io, "a tensor has an unusable name");
  const std::string type = text(member(value, "dtype"), "dtype");
  const auto known =
      std::find_if(std::begin(kScalars), std::end(kScalars), [&](const auto& entry) { return entry.second == type; });
  if (known == std::end(kScalars)) throw error(ExitCode::io, "tensor {} has an unknown dtype", tensor.name);
  tensor.type = known->first;
  for (const json& extent : array(member(value, "shape"), "shape")) tensor.shape.push_back(integer(extent, "shape", 1));
  if (tensor.shape.empty() || tensor.shape.size() > kMostAxes)
    throw error(ExitCode::io, "tensor {} has {} axes", tensor.name, tensor.shape.size());
  bytes_of(tensor);
  return tensor;
}

bool safe_file_name(const std::string& name) {
  return usable_name(name) && name.find('/') == name.npos && name != kManifestName;
}

ShardEntry shard_of(const json& value, const std::vector<TensorEntry>& tensors) {
  ShardEntry shard;
  shard.file = text(member(value, "file"), "file");
  if (!safe_file_name(shard.file)) throw error(ExitCode::io, "a shard has an unusable file name");
  shard.bytes = integer(member(value, "bytes"), "bytes", 1);
  for (const json& digest : array(member(value, "sha256"), "sha256")) {
    shard.sha256.push_back(text(digest, "sha256"));
    if (shard.sha256.back().size() != kDigestDigits)
      throw error(ExitCode::io, "shard {} has a digest of the wrong length", shard.file);
  }
  if (static_cast<std::int64_t>(shard.sha256.size()) != storage::digest_segments(shard.bytes))
    throw error(ExitCode::io, "shard {} has {} digests for {} bytes", shard.file, shard.sha256.size(), shard.bytes);
  for (const json& rows : array(member(value, "owned"), "owned")) {
    if (array(rows, "owned").size() != 2)
      throw error(ExitCode::io, "shard {} has a range that is not two numbers", shard.file);
    shard.owned.push_back({integer(rows[0], "owned", 0), integer(rows[1], "owned", 0)});
    if (shard.owned.back().end < shard.owned.back().begin)
      throw error(ExitCode::io, "shard {} has a range that ends before it begins", shard.file);
  }
  if (shard.owned.size() != tensors.size())
    throw error(ExitCode::io, "shard {} has {} ranges for {} tensors", shard.file, shard.owned.size(), tensors.size());
  return shard;
}

/// Each row of each tensor is in exactly one shard, and the shards are large enough to contain them.
void require_cover(const Manifest& manifest) {
  std::int64_t claimed = 0, stored = 0;
  for (const ShardEntry& shard : manifest.shards)
    if (__builtin_add_overflow(stored, shard.bytes, &stored)) throw error(ExitCode::io, "the shards' sizes overflow");
  std::vector<parallel::Range> rows;
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
    const TensorEntry& tensor = manifest.tensors[t];
    if (__builtin_add_overflow(claimed, bytes_of(tensor), &claimed))
      throw error(ExitCode::io, "the tensors' sizes overflow");
    rows.clear();
    for (const ShardEntry& shard : manifest.shards)
      if (shard.owned[t].size() > 0) rows.push_back(shard.owned[t]);
    std::sort(rows.begin(), rows.end(), [](parallel::Range a, parallel::Range b) { return a.begin < b.begin; });
    std::int64_t covered = 0;
    for (const parallel::Range range : rows) {
      if (range.begin != covered)
        throw error(ExitCode::io, "rows {} of tensor {} are in {} shards", covered, tensor.name,
                    range.begin < covered ? "two" : "no");
      covered = range.end;
    }
    if (covered != tensor.shape[0])
      throw error(ExitCode::io, "tensor {} has {} rows, its shards hold {}", tensor.name, tensor.shape[0], covered);
  }
  if (claimed > stored) throw error(ExitCode::io, "the tensors take {} bytes, the shards have {}", claimed, stored);
}

}  // namespace

std::int64_t Manifest::cursor_at(const std::string& name) const {
  const auto at = cursor.find(name);
  if (at == cursor.end()) throw error(ExitCode::io, "its data cursor has no \"{}\"", name);
  return at->second;
}

std::string_view name_of(kernels::Scalar type) {
  for (const auto& [scalar, name] : kScalars)
    if (scalar == type) return name;
  return "unknown";
}

std::string to_text(const std::map<std::string, std::int64_t>& numbers, std::string_view separator) {
  std::string text;
  for (const auto& [name, number] : numbers)
    text += fmt::format("{}{} {}", text.empty() ? "" : separator, name, number);
  return text;
}

std::string directory_name(std::int64_t step) { return fmt::format("step_{:08d}", step); }
std::string shard_name(int rank) { return fmt::format("rank_{:05d}.h5", rank); }

std::int64_t bytes_of(const TensorEntry& tensor) {
  std::int64_t bytes = kernels::bytes_of(tensor.type);
  for (const std::int64_t extent : tensor.shape)
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > kLargest)
      throw error(ExitCode::io, "tensor {} is larger than any memory", tensor.name);
  return bytes;
}

std::string to_text(const Manifest& manifest) {
  std::string body = std::string(kFormatLine) + std::string(kDigestLine) + std::string(kDigestDigits, '0') + "\"";
  const auto put = [&](const char* key, const json& value) {
    body += fmt::format(",\n  \"{}\": {}", key, json_text(json(value)));
  };
  const auto put_list = [&](const char* key, const auto& items, auto&& describe) {
    body += fmt::format(",\n  \"{}\": [", key);
    const char* separator = "\n";
    for (const auto& item : items) {
      body += separator + std::string("    ") + json_text(json(describe(item)));
      separator = ",\n";
    }
    body += "\n  ]";
  };
  const json extra = parse_json<json>(manifest.extra);
  if (!extra.is_object()) throw error(ExitCode::internal, "the manifest's extra field is not a JSON object");
  put("format_version", manifest.format_version);
  put("step", manifest.step);
  put("tokens", manifest.tokens);
  put("cursor", json(manifest.cursor));
  put("world", manifest.world);
  put("grid", json(manifest.grid));
  put("code_revision", manifest.code_revision);
  put("libraries", manifest.libraries);
  put("dataset_fingerprint", manifest.dataset_fingerprint);
  put("input", manifest.input);
  put("original_input", manifest.original_input);
  if (manifest.fence > 0) put("owner", json{{"fence", manifest.fence}, {"token", manifest.owner}});
  put("extra", extra);
  put_list("tensors", manifest.tensors, [](const TensorEntry& tensor) {
    return json{{"name", tensor.name}, {"dtype", std::string(name_of(tensor.type))}, {"shape", tensor.shape}};
  });
  put_list("shards", manifest.shards, [](const ShardEntry& shard) {
    json owned = json::array();
    for (const parallel::Range rows : shard.owned) owned.push_back(json::array({rows.begin, rows.end}));
    return json{{"file", shard.file}, {"bytes", shard.bytes}, {"sha256", shard.sha256}, {"owned", std::move(owned)}};
  });
  body += "\n}\n";
  return body.replace(kDigestAt, kDigestDigits, storage::sha256(body));
}

Manifest parse(std::string_view given) {
  if (!given.starts_with(kFormatLine)) throw error(ExitCode::io, "it is not the manifest of a Weft checkpoint");
  if (given.size() < kDigestAt + kDigestDigits || given.substr(kFormatLine.size(), kDigestLine.size()) != kDigestLine)
    throw error(ExitCode::io, "it has no sha256 of its own (torn write)");
  std::string content(given);
  const std::string digest = content.substr(kDigestAt, kDigestDigits);
  content.replace(kDigestAt, kDigestDigits, kDigestDigits, '0');
  if (const std::string actual = storage::sha256(content); actual != digest)
    throw error(ExitCode::io, "its text has sha256 {:.8}..., not the recorded {:.8}... (damaged)", actual, digest);

  if (nesting_of(content) > kDeepestJson)
    throw error(ExitCode::io, "its lists and objects are nested more than {} deep", kDeepestJson);
  const json root = parse_json<json>(content);
  if (root.is_discarded()) throw error(ExitCode::io, "it is not JSON");
  Manifest manifest;
  manifest.format_version = integer(member(root, "format_version"), "format_version", 1);
  if (manifest.format_version > kFormatVersion) throw NewerFormat(manifest.format_version);
  manifest.step = integer(member(root, "step"), "step", 0);
  manifest.tokens = integer(member(root, "tokens"), "tokens", 0);
  manifest.cursor = numbers_of(member(root, "cursor"), "cursor", 0);
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 30;
  manifest.world = integer(member(root, "world"), "world", 1, kMostRanks);
  manifest.grid = numbers_of(member(root, "grid"), "grid", 1, kMostRanks);
  if (manifest.format_version == 1) {  // fixed names
    for (const char* name : {"epoch", "position"}) manifest.cursor_at(name);
    for (const char* axis : {"data", "feature"}) integer(member(root["grid"], axis), axis, 1, kMostRanks);
  }
  manifest.code_revision = text(member(root, "code_revision"), "code_revision");
  const json& libraries = member(root, "libraries");
  if (!libraries.is_object()) throw error(ExitCode::io, "\"libraries\" is not an object");
  for (const auto& [name, version] : libraries.items()) manifest.libraries[name] = text(version, "libraries");
  manifest.dataset_fingerprint = text(member(root, "dataset_fingerprint"), "dataset_fingerprint");
  manifest.input = text(member(root, "input"), "input");
  manifest.original_input = text(member(root, "original_input"), "original_input");
  if (const auto owner = root.find("owner"); owner != root.end()) {  // not in older manifests
    manifest.fence = integer(member(*owner, "fence"), "fence", 1);
    manifest.owner = text(member(*owner, "token"), "token");
  }
  const json& extra = member(root, "extra");
  if (!extra.is_object()) throw error(ExitCode::io, "\"extra\" is not an object");
  manifest.extra = json_text(extra);

  std::set<std::string> names;
  for (const json& tensor : array(member(root, "tensors"), "tensors")) {
    manifest.tensors.push_back(tensor_of(tensor));
    if (!names.insert(manifest.tensors.back().name).second)
      throw error(ExitCode::io, "tensor {} is listed twice", manifest.tensors.back().name);
  }
  names.clear();
  for (const json& shard : array(member(root, "shards"), "shards")) {
    manifest.shards.push_back(shard_of(shard, manifest.tensors));
    if (!names.insert(manifest.shards.back().file).second)
      throw error(ExitCode::io, "shard {} is listed twice", manifest.shards.back().file);
  }
  if (static_cast<std::int64_t>(manifest.shards.size()) != manifest.world)
    throw error(ExitCode::io, "it lists {} shards of {} ranks", manifest.shards.size(), manifest.world);
  require_cover(manifest);
  return manifest;
}

}  // namespace weft::checkpoint

// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/describe.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/row_sample.hpp"
#include "dataset/activations/sidecar.hpp"
#include "dataset/activations/unpacked_chunks.hpp"
#include "storage/activation_file.hpp"
#include "storage/digest.hpp"
#include "storage/posix_file.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using storage::ActivationFile;
using storage::Side;

constexpr std::int64_t kNewestFormat = storage::kActivationFormatWithTokens;
// Rows checked at the start, middle and end of each dataset before training.
constexpr std::int64_t kSampleRows = 8;
// Bounds the startup time: compressed chunks must be unpacked completely for a sample.
constexpr std::int64_t kLargestSample = std::int64_t{2} << 30;
// A sample with fewer values may be non-negative by chance.
constexpr std::int64_t kFewestForSigns = 128;
constexpr std::int64_t kFingerprintBytes = std::int64_t{1} << 20;
constexpr std::int64_t kMostFiles = 1'000'000;

bool is_hdf5(std::string_view name) { return name.ends_with(".hdf5") || name.ends_with(".h5"); }

/// PREFIX and a number, "chunk_12.hdf5" -> 12; -1 for any other name.
std::int64_t number_of(std::string_view name, std::string_view prefix, bool hdf5) {
  if (!name.starts_with(prefix)) return -1;
  name.remove_prefix(prefix.size());
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos) return -1;
  const std::string_view ending = name.substr(dot);
  if (hdf5 ? ending != ".hdf5" && ending != ".h5" : ending != ".safetensors") return -1;
  name = name.substr(0, dot);
  std::int64_t number = -1;
  const auto [end, status] = std::from_chars(name.data(), name.data() + name.size(), number);
  return status == std::errc() && end == name.data() + name.size() && number >= 0 ? number : -1;
}

/// The files with this prefix in the order of their numbers, which have no gap; empty if there is none.
std::vector<std::string> numbered(const std::string& directory, const std::vector<std::string>& all,
                                  std::string_view prefix, bool hdf5) {
  const std::string_view what = prefix.substr(0, prefix.size() - 1);  // "chunk"
  std::map<std::int64_t, std::string> found;
  for (const std::string& name : all) {
    const std::int64_t number = number_of(name, prefix, hdf5);
    if (number < 0) continue;
    const auto [at, fresh] = found.emplace(number, name);
    if (!fresh)
      throw error(ExitCode::data, "{}: {} and {} are both {} {} (each number must be unique); remove one of them",
                  directory, std::min(at->second, name), std::max(at->second, name), what, number);
  }
  std::vector<std::string> names;
  for (const auto& [number, name] : found) {
    if (number != static_cast<std::int64_t>(names.size()))
      throw error(
          ExitCode::data,
          "{}: {}_{} is missing ({} exists; files must be numbered from 0 without a gap); was the dataset copied "
          "completely?",
          directory, what, names.size(), name);
    names.push_back(name);
  }
  return names;
}

/// The files of a dataset in their order.
std::vector<std::string> activation_files(const std::string& directory) {
  std::error_code failure;
  std::vector<std::string> all, names, hdf5;
  bool compressed = false;
  for (std::filesystem::directory_iterator entry(directory, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    all.push_back(entry->path().filename().string());
    if (is_hdf5(all.back())) hdf5.push_back(all.back());
    compressed = compressed || (all.back().starts_with("activations_") && all.back().ends_with(".bin"));
  }
  if (failure)
    throw error(ExitCode::data, "{}: cannot be listed ({}); is the path of the dataset correct?", directory,
                failure.message());
  names = numbered(directory, all, "chunk_", true);
  if (names.empty()) names = numbered(directory, all, "activations_split_", false);
  if (names.empty() && hdf5.size() == 1) names = hdf5;
  if (names.empty() && compressed)
    throw error(ExitCode::usage,
                "{}: its activations are quantised and compressed (they are not read in place); convert them: weft "
                "import {} --output DIR",
                directory, directory);
  if (names.empty())
    throw error(ExitCode::data,
                "{}: no activations found (no file chunk_*.hdf5 or chunk_*.h5, no activations_split_*.safetensors, and "
                "not one HDF5 file); is the path of the dataset correct?",
                directory);
  if (static_cast<std::int64_t>(names.size()) > kMostFiles)
    throw error(ExitCode::data, "{}: {} files (at most {} are accepted)", directory, names.size(), kMostFiles);
  return names;
}

/// The type of the values. Integers are bf16 patterns only if an attribute or the input says so.
Scalar value_type(const storage::MatrixHeader& header, const std::string& stored_as, const std::string& where) {
  if (header.type != Scalar::u16) return header.type;
  if (header.declared == "bf16" || header.declared == "bfloat16" || stored_as == "bf16") return Scalar::bf16;
  throw error(ExitCode::data,
              "{} holds unsigned 16-bit integers (no attribute declares their meaning); if they are bf16 patterns, set "
              "data.stored_as = \"bf16\"",
              where);
}

bool negative(const std::byte* value, std::int64_t bytes) {
  return (std::to_integer<unsigned>(value[bytes - 1]) & 0x80u) != 0;  // little-endian: the sign is in the last byte
}

/// Checks a few rows of one dataset.
void check_sample(ActivationFile& file, const std::string& path, Side side, std::int64_t layer, Scalar type) {
  const storage::MatrixHeader& header = file.header().matrix(side, layer);
  const std::string name = storage::dataset_name(side, layer, file.layout());
  const std::int64_t bytes = kernels::bytes_of(type);
  const std::int64_t rows = std::min(kSampleRows, header.rows);
  std::vector<std::byte> values(static_cast<std::size_t>(rows * header.columns * bytes));
  const std::int64_t first_chunk =
      header.direct || header.chunk_rows == 0 ? header.rows : std::min(header.rows, header.chunk_rows);
  std::int64_t seen = 0, negatives = 0, end = 0;
  // Only the first chunk of a compressed dataset is unpacked.
  for (const std::int64_t wanted : {std::int64_t{0}, (first_chunk - rows) / 2, first_chunk - rows}) {
    const std::int64_t begin = std::clamp<std::int64_t>(wanted, end, header.rows);
    const std::int64_t count = std::min(rows, first_chunk - begin);
    if (count <= 0) continue;
    end = begin + count;
    file.read(side, layer, begin, count, values.data(), header.columns * bytes);
    const std::int64_t n = count * header.columns;
    if (const std::int64_t bad = first_non_finite(type, values.data(), n); bad >= 0)
      throw error(ExitCode::data,
                  "{}: {} row {}, column {} is not finite; remove the row or regenerate the activations", path, name,
                  begin + bad / header.columns, bad % header.columns);
    seen += n;
    for (std::int64_t i = 0; i < n; ++i) negatives += negative(values.data() + i * bytes, bytes);
  }
  // Values of floating-point types keep their sign; rectified ones have none.
  if (header.type == Scalar::u16 && seen >= kFewestForSigns && negatives == 0)
    throw error(
        ExitCode::data,
        "{}: {} has no negative value in a sample of {} (known defect: a writer stored signed data in an unsigned "
        "dataset, which turns negative activations into 0); regenerate the activations",
        path, name, seen);
}

/// The files to sample: all uncompressed ones, and as many compressed ones, evenly spaced, as kLargestSample allows.
std::vector<bool> sampled_files(const std::vector<FileDescription>& files, std::int64_t row_bytes) {
  std::vector<bool> sampled(files.size(), true);
  std::vector<std::size_t> compressed;
  std::int64_t unpacked = 1;
  for (std::size_t i = 0; i < files.size(); ++i)
    if (files[i].compressed) {
      compressed.push_back(i);
      unpacked =
          std::max(unpacked, 2 * row_bytes * std::max<std::int64_t>(1, std::min(files[i].rows, files[i].chunk_rows)));
    }
  const std::size_t affordable = static_cast<std::size_t>(std::max<std::int64_t>(1, kLargestSample / unpacked));
  if (compressed.size() <= affordable) return sampled;
  for (const std::size_t i : compressed) sampled[i] = false;
  for (std::size_t i = 0; i < affordable; ++i) sampled[compressed[i * compressed.size() / affordable]] = true;
  return sampled;
}

std::string token_text(const storage::ActivationHeader& header) {
  return !header.tokens ? "no token ids" : header.documents ? "token ids" : "token ids without documents";
}

void check_same(const std::string& path, std::string_view what, const std::string& value, const std::string& first,
                const std::string& first_path) {
  if (value != first)
    throw error(
        ExitCode::data,
        "{}: {} is \"{}\", in {} it is \"{}\" (all files must come from the same model and hook points); were two "
        "datasets mixed?",
        path, what, printable(value), first_path, printable(first));
}

}  // namespace

std::string expand_environment(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] != '$') {
      out += text[i++];
      continue;
    }
    const bool braces = i + 1 < text.size() && text[i + 1] == '{';
    std::size_t begin = i + (braces ? 2 : 1), end = begin;
    while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) || text[end] == '_')) ++end;
    const std::string name(text.substr(begin, end - begin));
    if (name.empty() || (braces && (end == text.size() || text[end] != '}')))
      throw collective_error(
          ExitCode::usage, "\"{}\": $ is not followed by NAME or {{NAME}} (it denotes an environment variable)", text);
    const char* value = std::getenv(name.c_str());
    if (value == nullptr || *value == '\0')  // empty counts as unset
      throw collective_error(ExitCode::usage,
                             "\"{}\": environment variable {} is not set; set it or give the full path", text, name);
    out += value;
    i = end + (braces ? 1 : 0);
  }
  return out;
}

HookPoints hook_points(const std::string& directory) {
  const ActivationFile file(directory + "/" + activation_files(directory).front());
  return {file.header().model, file.header().hook_inputs, file.header().hook_targets};
}

Description describe(const std::string& path, const Settings& settings) {
  Description description;
  description.path = path;
  while (description.path.size() > 1 && description.path.back() == '/') description.path.pop_back();
  const std::string& directory = description.path;
  if (!settings.stored_as.empty() && settings.stored_as != "bf16")
    throw error(ExitCode::usage, "data.stored_as = \"{}\" is not known (valid: \"bf16\", \"\")", settings.stored_as);

  for (const std::string& name : activation_files(directory)) {
    FileDescription file;
    file.name = name;
    description.files.push_back(file);
  }

  std::string ends, rows;
  std::string first_path, first_format, first_tokens;
  for (std::size_t i = 0; i < description.files.size(); ++i) {
    FileDescription& file = description.files[i];
    const std::string file_path = description.file_path(static_cast<std::int64_t>(i));
    ActivationFile opened(file_path);
    const storage::ActivationHeader& header = opened.header();
    const bool own = header.format == storage::kActivationFormat;
    if (own && (header.format_version < 1 || header.format_version > kNewestFormat))
      throw error(
          ExitCode::data,
          "{}: format_version is {} (this program reads 1 to {}); use the Weft version that wrote it or a newer "
          "one",
          file_path, header.format_version, kNewestFormat);
    if (i == 0) {
      first_path = file_path;
      first_format = header.format;
      description.own_layout = own;
      description.layout = opened.layout();
      description.model = header.model;
      description.hook_inputs = header.hook_inputs;
      description.hook_targets = header.hook_targets;
      description.has_tokens = header.tokens.has_value();
      description.n_layers = header.n_layers();
      description.d_model = header.inputs[0].columns;
      description.dtype = value_type(header.inputs[0], settings.stored_as,
                                     file_path + ": " + storage::dataset_name(Side::inputs, 0, opened.layout()));
    }
    check_same(file_path, "attribute format", header.format, first_format, first_path);
    check_same(file_path, "attribute model", header.model, description.model, first_path);
    check_same(file_path, "attribute hook_inputs", header.hook_inputs, description.hook_inputs, first_path);
    check_same(file_path, "attribute hook_targets", header.hook_targets, description.hook_targets, first_path);
    if (header.n_layers() != description.n_layers)
      throw error(ExitCode::data,
                  "{}: /layer_{} is {}, {} has {} layers (all files must have the same); was the file written "
                  "completely?",
                  file_path, std::min(header.n_layers(), description.n_layers),
                  header.n_layers() < description.n_layers ? "missing" : "unexpected", first_path,
                  description.n_layers);

    if (i == 0) first_tokens = token_text(header);
    if (first_tokens != token_text(header))
      throw error(ExitCode::data, "{}: has {}, {} has {} (all files must agree); were two datasets mixed?", file_path,
                  token_text(header), first_path, first_tokens);
    if (header.documents) description.n_documents += header.documents->count;
    if (header.context_rows > 0) description.n_documents += header.inputs[0].rows / header.context_rows;

    file.bytes = opened.bytes();
    file.modified = opened.modified();
    file.rows = header.inputs[0].rows;
    for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
      for (const Side side : {Side::inputs, Side::targets}) {
        const storage::MatrixHeader& matrix = header.matrix(side, layer);
        const std::string where = file_path + ": " + storage::dataset_name(side, layer, opened.layout());
        if (matrix.columns != description.d_model)
          throw error(
              ExitCode::data,
              "{} has {} columns, /layer_0/inputs of {} has {} (all layers must have the same d_model); was this file "
              "written for another model?",
              where, matrix.columns, first_path, description.d_model);
        if (matrix.rows != file.rows)
          throw error(
              ExitCode::data,
              "{} has {} rows, /layer_0/inputs has {} (row n must be the same token in all datasets); was the file "
              "written completely?",
              where, matrix.rows, file.rows);
        const Scalar type = value_type(matrix, settings.stored_as, where);
        if (type != description.dtype)
          throw error(ExitCode::data,
                      "{} is {}, /layer_0/inputs of {} is {} (all values must have the same type); convert one of them",
                      where, name_of(type), first_path, name_of(description.dtype));
        file.chunk_rows = std::max(file.chunk_rows, matrix.chunk_rows);
        file.compressed = file.compressed || !matrix.direct;
      }
    description.n_rows += file.rows;
    note_progress();
    ends += fmt::format("{} {} {} {} {} {}\n", file.name, file.bytes, file.rows, description.n_layers,
                        description.d_model, name_of(description.dtype));
    const storage::PosixFile bytes(file_path);
    for (const auto& [side, layer] :
         {std::pair{Side::inputs, std::int64_t{0}}, {Side::targets, description.n_layers - 1}})
      for (const storage::StoredBytes& end : opened.ends(side, layer, kFingerprintBytes)) {
        std::string piece(static_cast<std::size_t>(end.bytes), '\0');
        bytes.read(piece.data(), end.bytes, end.offset);
        ends += storage::sha256(piece) + "\n";
      }
    const auto number = static_cast<std::int64_t>(i), n_files = static_cast<std::int64_t>(description.files.size());
    rows += row_sample(opened, file_path, number, n_files);
    file.probe = row_probe(opened, file_path, number);
  }
  description.fingerprint = fmt::format("ends:{},rows:{}", storage::sha256(ends), storage::sha256(rows));
  if (settings.layers > 0 && (settings.layers != description.n_layers || settings.d_model != description.d_model))
    throw error(
        ExitCode::data,
        "{} has {} layers and d_model {}, data.layers = {} and data.d_model = {} (files and input describe different "
        "models); correct one of them",
        directory, description.n_layers, description.d_model, settings.layers, settings.d_model);

  check_metadata(description);
  check_index(description);
  description.has_statistics = std::filesystem::exists(directory + "/norm_stats.json");
  description.has_vocabulary = description.has_tokens && std::filesystem::exists(directory + "/vocabulary.json");

  const std::vector<bool> sampled = sampled_files(description.files, description.row_bytes());
  for (std::size_t i = 0; i < sampled.size(); ++i) {
    if (!sampled[i]) continue;
    const std::string file_path = description.file_path(static_cast<std::int64_t>(i));
    ActivationFile file(file_path);
    for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
      for (const Side side : {Side::inputs, Side::targets})
        check_sample(file, file_path, side, layer, description.dtype);
  }

  if (!description.own_layout && description.hook_inputs.empty())
    description.notes.push_back(
        "the files do not name the hook points of the model at which the activations were taken");
  std::int64_t unpacked_for = 0, unpacked_rows = 0;
  for (const FileDescription& file : description.files)
    if (file.compressed && file.chunk_rows > 4 * settings.block_rows) {
      unpacked_for = std::max(unpacked_for, file.chunk_rows);
      unpacked_rows += file.rows;
    }
  // Chunks that fit into memory together are unpacked once per pass (unpacked_chunks.hpp).
  if (unpacked_rows * 2 * description.row_bytes() > bytes_kept_unpacked(description))
    description.notes.push_back(
        fmt::format("compressed chunks of {} rows are unpacked for blocks of {} rows; a larger data.block_rows or "
                    "uncompressed files are faster",
                    unpacked_for, settings.block_rows));
  return description;
}

Description imagined(const std::string& path, const Settings& settings) {
  Description description;
  description.path = path;
  description.own_layout = true;
  description.n_layers = settings.layers;
  description.d_model = settings.d_model;
  description.dtype = Scalar::bf16;
  FileDescription file;
  file.name = "chunk_0.h5";
  file.rows = settings.window_rows;
  description.files.push_back(file);
  return description;
}

Description describe(const parallel::World& world, const std::string& path, const Settings& settings) {
  parallel::note_phase("reading the headers of the data");
  Description description = description_from_text(world.on_root([&] { return to_text(describe(path, settings)); }));
  require_same_files(world, description);
  description.targets_are_inputs = settings.targets == Targets::inputs;
  return description;
}

}  // namespace weft::dataset

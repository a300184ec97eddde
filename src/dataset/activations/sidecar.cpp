// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/sidecar.hpp"

#include <filesystem>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "storage/posix_file.hpp"

namespace weft::dataset {
namespace {

using json = SortedJson;

constexpr std::int64_t kLargestMetadata = std::int64_t{1} << 20;

/// The first n bytes as a little-endian number.
std::uint64_t word(const std::byte* bytes, int n) {
  std::uint64_t value = 0;
  for (int i = n - 1; i >= 0; --i) value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

/// True if the file exists. A missing one is an unfinished dataset in Weft's own layout, and a note otherwise.
bool present(Description& description, const std::string& path) {
  if (!description.layout.empty()) return false;  // those layouts have none
  if (std::filesystem::exists(path)) return true;
  if (description.own_layout)
    throw error(ExitCode::data, "{}: is missing (it is written after all data); was the dataset written completely?",
                path);
  description.notes.push_back(path.substr(path.rfind('/') + 1) + " is missing; sizes come from the chunk files");
  return false;
}

}  // namespace

std::string read_small_file(const std::string& path, std::int64_t at_most) {
  open_regular(path, ExitCode::data);  // no regular file: an error of the dataset, not of the disk
  const storage::PosixFile file(path);
  if (file.bytes() > at_most)
    throw error(ExitCode::data, "{}: has {} bytes (at most {} are accepted); is it the correct file?", path,
                file.bytes(), at_most);
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  file.read(text.data(), file.bytes(), 0);
  return text;
}

void check_metadata(Description& description) {
  const std::string path = description.path + "/metadata.json";
  if (present(description, path)) check_metadata_text(path, read_small_file(path, kLargestMetadata), description);
}

void check_metadata_text(const std::string& path, std::string_view text, Description& description) {
  const json metadata = parse_json<json>(text);
  if (metadata.is_discarded() || !metadata.is_object())
    throw error(ExitCode::data, "{}: is not a JSON object of at most {} levels; is it truncated?", path, kDeepestJson);
  const auto check_number = [&](const char* key, std::int64_t in_files) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) return;
    if (!found->is_number_integer()) throw error(ExitCode::data, "{}: {} is not an integer; is it damaged?", path, key);
    if (found->is_number_unsigned() ? found->get<std::uint64_t>() != static_cast<std::uint64_t>(in_files)
                                    : found->get<std::int64_t>() != in_files)
      throw error(
          ExitCode::data,
          "{}: {} is {}, the files have {} ({} has /layer_0 to /layer_{}, {} columns; {} rows in {} files); does it "
          "belong to these files?",
          path, key, json_text(*found), in_files, description.files.front().name, description.n_layers - 1,
          description.d_model, description.n_rows, description.files.size());
  };
  if (const auto layers = metadata.find("num_layers");
      layers != metadata.end() && layers->is_number_unsigned() &&
      layers->get<std::uint64_t>() > static_cast<std::uint64_t>(description.n_layers))
    throw error(ExitCode::data,
                "{}: /layer_{} is missing (metadata.json says num_layers = {}); was the file written completely?",
                description.file_path(0), description.n_layers, json_text(*layers));
  check_number("num_layers", description.n_layers);
  check_number("d_model", description.d_model);
  check_number("total_tokens", description.n_rows);

  if (const auto dtype = metadata.find("dtype"); dtype != metadata.end()) {
    if (!dtype->is_string()) throw error(ExitCode::data, "{}: dtype is not a string; is it damaged?", path);
    const std::string said = dtype->get<std::string>();
    const std::string plain = said.starts_with("torch.") ? said.substr(6) : said;
    const std::string_view stored = name_of(description.dtype);
    const bool same = (stored == "fp32" && (plain == "float32" || plain == "fp32" || plain == "float")) ||
                      (stored == "fp16" && (plain == "float16" || plain == "fp16" || plain == "half")) ||
                      (stored == "bf16" && (plain == "bfloat16" || plain == "bf16" || plain == "uint16"));
    if (!same)
      throw error(ExitCode::data,
                  "{}: dtype is \"{}\", the files hold {} (/layer_0/inputs of {}); does it belong to these files?",
                  path, printable(said), stored, description.files.front().name);
  }
  if (const auto model = metadata.find("model_name"); model != metadata.end() && model->is_string()) {
    const std::string said = model->get<std::string>();
    if (!description.model.empty() && description.model != said)
      throw error(
          ExitCode::data,
          "{}: model_name is \"{}\", the files have \"{}\" (attribute model of {}); does it belong to these files?",
          path, printable(said), printable(description.model), description.files.front().name);
    description.model = said;
  }
}

void check_index(Description& description) {
  const std::string path = description.path + "/index.bin";
  if (!present(description, path)) return;
  // The older format has 8 bytes per row; a valid file is not longer.
  const std::int64_t at_most =
      std::max<std::int64_t>(16 * static_cast<std::int64_t>(description.files.size()), 8 * description.n_rows);
  const std::string bytes = read_small_file(path, at_most);
  check_index_bytes(path, std::as_bytes(std::span(bytes)), description);
}

void check_index_bytes(const std::string& path, std::span<const std::byte> bytes, const Description& description) {
  const std::size_t n_files = description.files.size();
  const auto per_file = [&]() -> std::string {
    if (bytes.size() != 16 * n_files)
      return fmt::format("has {} bytes ({} records of 16 for {} files, or {} of 8 for {} rows, are expected)",
                         bytes.size(), n_files, n_files, description.n_rows, description.n_rows);
    std::int64_t first_row = 0;
    for (std::size_t i = 0; i < n_files; ++i) {
      const std::byte* record = bytes.data() + 16 * i;
      const std::int64_t file = static_cast<std::int32_t>(word(record, 4)),
                         rows = static_cast<std::int32_t>(word(record + 4, 4));
      const std::int64_t offset = static_cast<std::int64_t>(word(record + 8, 8));
      if (file != static_cast<std::int64_t>(i) || rows != description.files[i].rows || offset != first_row)
        return fmt::format("record {} says file {}, {} rows from row {}; {} has {} rows from row {}", i, file, rows,
                           offset, description.files[i].name, description.files[i].rows, first_row);
      first_row += rows;
    }
    return "";
  };
  const std::string why = per_file();
  if (why.empty()) return;
  if (static_cast<std::int64_t>(bytes.size()) != 8 * description.n_rows)
    throw error(ExitCode::data, "{}: {}; does it belong to these files?", path, why);

  std::vector<std::int64_t> first_row{0};
  for (const FileDescription& file : description.files) first_row.push_back(first_row.back() + file.rows);
  std::vector<bool> seen(static_cast<std::size_t>(description.n_rows), false);
  for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
    const std::uint64_t file = word(bytes.data() + 8 * i, 4), row = word(bytes.data() + 8 * i + 4, 4);
    if (file >= n_files || row >= static_cast<std::uint64_t>(description.files[file].rows))
      throw error(ExitCode::data,
                  "{}: record {} says row {} of chunk_{}, which does not exist; does it belong to these files?", path,
                  i, row, file);
    const std::size_t at = static_cast<std::size_t>(first_row[file]) + row;
    if (seen[at])
      throw error(ExitCode::data, "{}: row {} of chunk_{} is listed twice; is it damaged?", path, row, file);
    seen[at] = true;
  }
}

}  // namespace weft::dataset

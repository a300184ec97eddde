// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/chunk_files.hpp"

#include "base/error.hpp"
#include "storage/activation_file.hpp"

namespace weft::dataset {
namespace {

constexpr const char* kContents = "harvest";

/// "context was 128, now 64", for each entry that differs; "" if none does.
std::string differences(const Json& found, const Json& expected) {
  std::string text;
  for (const auto& [key, value] : expected.items())
    if (const Json was = found.is_object() ? found.value(key, Json()) : Json(); was != value)
      text += fmt::format("{}{} was {}, now {}", text.empty() ? "" : "; ", key, json_text(was), json_text(value));
  return text;
}

}  // namespace

ChunkFiles::ChunkFiles(const WriterSettings& settings, Json contents)
    : settings_(settings), contents_(std::move(contents)) {}

std::filesystem::path ChunkFiles::path_of(std::int64_t number) const {
  return settings_.path + fmt::format("/chunk_{}.hdf5", number);
}

bool ChunkFiles::holds(std::int64_t number, std::int64_t rows) const {
  const std::filesystem::path path = path_of(number);
  if (!std::filesystem::exists(path)) return false;
  const storage::ActivationFile file(path);
  const storage::Handle root = storage::open_file(path);
  std::string differ = "it has no attribute \"harvest\"";
  if (storage::has_attribute(root, kContents))
    differ = differences(parse_json(storage::read_text_attribute(root, kContents)), contents_);
  if (const std::int64_t found = file.header().matrix(storage::Side::inputs, 0).rows; differ.empty() && found != rows)
    differ = fmt::format("it has {} rows, now {}", found, rows);
  if (!differ.empty())
    throw error(ExitCode::usage, "{}: belongs to another dataset ({}); choose another --output", path.string(), differ);
  return true;
}

std::unique_ptr<ChunkFile> ChunkFiles::begin(std::int64_t number, std::int64_t rows) const {
  return std::make_unique<ChunkFile>(settings_, rows, contents_, path_of(number));
}

ChunkFile::ChunkFile(const WriterSettings& settings, std::int64_t rows, const Json& contents,
                     const std::filesystem::path& path)
    : output_(path, storage::PendingOutput::Kind::file),
      file_(output_.place(), whole_file_shape(settings, rows), storage::kActivationFormatWithTokens,
            [&] {
              std::map<std::string, std::string> attributes = root_attributes(settings);
              attributes[kContents] = json_text(contents);
              return attributes;
            }()),
      documents_(1, 0) {}  // the first row of a file always begins a document

void ChunkFile::append(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                       std::span<const std::int64_t> documents, const std::byte* inputs, const std::byte* targets) {
  const auto before = static_cast<std::int64_t>(ids_.size());
  for (const std::int64_t row : documents)
    if (before + row > 0) documents_.push_back(before + row);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  positions_.insert(positions_.end(), positions.begin(), positions.end());
  file_.append(static_cast<std::int64_t>(ids.size()), inputs, targets);
}

void ChunkFile::finish() {
  file_.write_tokens(ids_, documents_, positions_);
  file_.close();
  output_.publish();
}

}  // namespace weft::dataset

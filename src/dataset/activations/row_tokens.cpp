// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/row_tokens.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/progress.hpp"
#include "dataset/activations/row_sample.hpp"
#include "dataset/activations/sidecar.hpp"
#include "storage/activation_file.hpp"
#include "storage/posix_file.hpp"

namespace weft::dataset {
namespace {

constexpr const char* kVocabularyFormat = "weft-vocabulary";
constexpr std::int64_t kLargestVocabulary = std::int64_t{256} << 20;  // bytes
constexpr std::int64_t kPieceRows = std::int64_t{1} << 18;

}  // namespace

struct RowTokens::State {
  explicit State(const Description& d) : description(d) {
    for (const FileDescription& file : d.files) first_row.push_back(first_row.back() + file.rows);
  }

  Description description;
  std::vector<std::int64_t> first_row{0};  // [file + 1]

  // The file used last: contexts are read in the order of their rows.
  std::int64_t open_index = -1;
  std::optional<storage::PosixFile> file;
  storage::StoredArray ids;
  std::vector<std::int64_t> documents;  // first rows, and the number of rows as an end

  void open(std::int64_t index) {
    if (index == open_index) return;
    open_index = -1;
    const std::string path = description.file_path(index);
    storage::ActivationFile opened(path);
    require_described(opened, description, index);
    const storage::ActivationHeader& header = opened.header();
    if (!header.tokens) throw error(ExitCode::data, "{}: /tokens is missing; was the file changed?", path);
    const std::int64_t rows = description.files[static_cast<std::size_t>(index)].rows;
    file.emplace(path);
    ids = *header.tokens;
    documents.assign(1, 0);
    for (std::int64_t row = header.context_rows; row > 0 && row < rows; row += header.context_rows)
      documents.push_back(row);
    if (header.documents) {
      documents.resize(static_cast<std::size_t>(header.documents->count));
      file->read(documents.data(), 8 * header.documents->count, header.documents->offset);
      for (std::size_t i = 0; i < documents.size(); ++i)
        if (i == 0 ? documents[i] != 0 : documents[i] <= documents[i - 1] || documents[i] >= rows)
          throw error(ExitCode::data,
                      "{}: /documents entry {} is {} (entries ascend from 0 and are below {}); is the "
                      "file damaged?",
                      path, i, documents[i], rows);
    }
    documents.push_back(rows);
    open_index = index;
  }
};

RowTokens::RowTokens(const Description& description) : state_(std::make_unique<State>(description)) {}
RowTokens::~RowTokens() = default;

void RowTokens::read(std::int64_t file, std::int64_t begin, std::span<std::int32_t> ids) {
  State& state = *state_;
  state.open(file);
  if (state.ids.type == kernels::Scalar::i32) {
    state.file->read(ids.data(), static_cast<std::int64_t>(ids.size_bytes()), state.ids.offset + 4 * begin);
  } else {
    std::vector<std::int64_t> wide(ids.size());
    state.file->read(wide.data(), 8 * static_cast<std::int64_t>(ids.size()), state.ids.offset + 8 * begin);
    // An id that 32 bits do not hold is an error like a negative one.
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] =
          wide[i] < 0 || wide[i] > std::numeric_limits<std::int32_t>::max() ? -1 : static_cast<std::int32_t>(wide[i]);
  }
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0)
      throw error(ExitCode::data, "{}: /tokens row {} is {} (ids are not negative); is the file damaged?",
                  state.description.file_path(file), begin + static_cast<std::int64_t>(i), ids[i]);
}

parallel::Range RowTokens::document(std::int64_t file, std::int64_t row) {
  State& state = *state_;
  state.open(file);
  const auto next = std::upper_bound(state.documents.begin(), state.documents.end(), row);
  return {*(next - 1), *next};
}

RowTokens::Place RowTokens::place(std::int64_t row) const {
  const auto next = std::upper_bound(state_->first_row.begin(), state_->first_row.end(), row) - 1;
  return {next - state_->first_row.begin(), row - *next};
}

std::string check_tokens(const Description& description) {
  const Vocabulary vocabulary = read_vocabulary(description);
  RowTokens tokens(description);
  std::vector<std::int32_t> ids;
  std::int32_t smallest = std::numeric_limits<std::int32_t>::max(), largest = 0;
  for (std::size_t i = 0; i < description.files.size(); ++i)
    for (std::int64_t begin = 0; begin < description.files[i].rows; begin += kPieceRows) {
      ids.resize(static_cast<std::size_t>(std::min(kPieceRows, description.files[i].rows - begin)));
      tokens.read(static_cast<std::int64_t>(i), begin, ids);
      const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
      smallest = std::min(smallest, *low);
      largest = std::max(largest, *high);
      if (!vocabulary.empty() && *high >= static_cast<std::int64_t>(vocabulary.size()))
        throw error(ExitCode::data,
                    "{}: /tokens row {} is {} (vocabulary.json has {} texts); does vocabulary.json belong to these "
                    "files?",
                    description.file_path(static_cast<std::int64_t>(i)), begin + (high - ids.begin()), *high,
                    vocabulary.size());
      note_progress();
    }
  return fmt::format("ids {} to {}, {}", smallest, largest,
                     vocabulary.empty() ? "no texts" : fmt::format("texts of {} ids", vocabulary.size()));
}

Vocabulary read_vocabulary(const Description& description) {
  if (!description.has_vocabulary) return {};
  const std::string path = description.path + "/vocabulary.json";
  return vocabulary_from_text(path, read_small_file(path, kLargestVocabulary));
}

Vocabulary vocabulary_from_text(const std::string& path, std::string_view text) {
  const SortedJson json = parse_json<SortedJson>(text);
  if (json.is_discarded() || !json.is_object() || json.value("format", SortedJson()) != kVocabularyFormat)
    throw error(ExitCode::data, "{}: is not a JSON object with format = \"{}\"; is it truncated?", path,
                kVocabularyFormat);
  if (json.value("format_version", SortedJson()) != 1)
    throw error(ExitCode::data, "{}: format_version is not 1; use the Weft version that wrote it or a newer one", path);
  const auto texts = json.find("texts");
  if (texts == json.end() || !texts->is_array())
    throw error(ExitCode::data, "{}: \"texts\" is not a list; is it damaged?", path);
  Vocabulary vocabulary;
  for (std::size_t id = 0; id < texts->size(); ++id) {
    const SortedJson& entry = (*texts)[id];
    if (!entry.is_string()) throw error(ExitCode::data, "{}: text of id {} is not a string; is it damaged?", path, id);
    vocabulary.push_back(entry.get<std::string>());
  }
  return vocabulary;
}

std::string vocabulary_text(const Vocabulary& vocabulary) {
  return json_text(Json{{"format", kVocabularyFormat}, {"format_version", 1}, {"texts", vocabulary}}) + "\n";
}

}  // namespace weft::dataset

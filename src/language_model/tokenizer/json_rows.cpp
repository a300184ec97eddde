// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/json_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
constexpr std::size_t kMessagesKept = 3;

/// Moves a string out of an object; false if there is none.
bool take_text(SortedJson& object, const char* key, std::string& text) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return false;
  text = std::move(found->get_ref<std::string&>());
  return true;
}

/// Takes the owner of a row out of its object. Returns why it has none, "".
std::string take_owner(const SortedJson& object, const std::string& field, std::string& owner) {
  if (field.empty() || !object.is_object()) return "";
  const auto found = object.find(field);
  if (found == object.end()) return fmt::format("has no \"{}\" (privacy.owner_field: the owner of the row)", field);
  if (!found->is_string() && !found->is_number_integer())
    return fmt::format("\"{}\" is not a string or an integer of 64 bits (privacy.owner_field: the owner of the row)",
                       field);
  owner = found->is_string() ? found->get<std::string>() : found->dump();
  return owner.empty() ? fmt::format("\"{}\" is empty (privacy.owner_field: the owner of the row)", field) : "";
}

std::string take_segments(SortedJson& list, JsonRow& row) {
  if (!list.is_array()) return "\"segments\" is not a list";
  bool counts = false;
  for (SortedJson& segment : list) {
    std::string text;
    const auto loss = segment.is_object() ? segment.find("loss") : segment.end();
    if (!segment.is_object() || !take_text(segment, "text", text) || loss == segment.end() || !loss->is_boolean())
      return "a segment is not {\"text\": TEXT, \"loss\": true or false}";
    const bool next = loss->get<bool>();
    segment = nullptr;  // its memory is free before the next is taken
    if (text.empty()) continue;
    if (next != counts) {
      row.borders.push_back(row.text.size());
      counts = next;
    }
    row.text += text;
  }
  if (row.borders.size() > kMostBorders)
    return fmt::format("its tokens begin or cease to count {} times (at most {})", row.borders.size(), kMostBorders);
  return "";
}

}  // namespace

bool is_conversation(const SortedJson& object) {
  if (!object.is_object() || object.contains("segments")) return false;
  const auto prompt = object.find("prompt");
  return object.contains("messages") || (prompt != object.end() && prompt->is_array());
}

std::string take_row(SortedJson& object, JsonRow& row) {
  if (!object.is_object()) return "not a JSON object";
  row.text.clear();
  row.borders.clear();
  const bool text = object.contains("text"), completion = object.contains("completion"),
             segments = object.contains("segments");
  if (text + completion + segments != 1)
    return text + completion + segments == 0 ? "has no \"text\", no \"prompt\" and \"completion\", and no \"segments\""
                                             : "has more than one of \"text\", \"completion\" and \"segments\"";
  if (segments) {
    row.form = JsonRow::Form::segments;
    return take_segments(object["segments"], row);
  }
  if (text) {
    row.form = JsonRow::Form::text;
    row.borders = {0};
    return take_text(object, "text", row.text) ? "" : "\"text\" is not a string";
  }
  row.form = JsonRow::Form::completion;
  std::string end;
  if (!take_text(object, "prompt", row.text)) return "\"prompt\" is missing or not a string";
  if (!take_text(object, "completion", end)) return "\"completion\" is not a string";
  row.borders = {row.text.size()};
  row.text += end;
  return "";
}

JsonRowReader::JsonRowReader(std::string_view text, std::string path, dataset::BadLines bad_lines,
                             std::string owner_field)
    : rest_(text), path_(std::move(path)), bad_lines_(bad_lines), owner_field_(std::move(owner_field)) {
  if (!rest_.starts_with(kByteOrderMark)) return;
  rest_.remove_prefix(kByteOrderMark.size());
  mark_ = kByteOrderMark.size();
}

bool JsonRowReader::next(JsonRow& row) {
  while (!rest_.empty()) {
    const std::size_t end = std::min(rest_.find('\n'), rest_.size());
    const std::string_view line = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    ++line_;
    note_progress();
    if (line.find_first_not_of(" \t\r") == line.npos) continue;

    JsonFault fault;
    if (line.size() > kLongestLine) {
      fault.why = fmt::format("has {} bytes (at most {} are read)", line.size(), kLongestLine);
    } else if (SortedJson object = parse_json(line, fault); !object.is_discarded()) {
      if (is_conversation(object))
        throw error(ExitCode::data,
                    "{0}:{1}: is a conversation, which becomes a text by the chat template of its model; convert the "
                    "file: weft prepare {0} --model DIRECTORY --output OUT.jsonl",
                    path_, line_);
      fault.why = take_owner(object, owner_field_, row.owner);
      if (fault.why.empty()) fault.why = take_row(object, row);
    }
    if (fault.why.empty()) {
      row.line = line_;
      return true;
    }
    if (fault.byte > 0 && line_ == 1) fault.byte += mark_;
    const std::string message = fmt::format(
        "{}:{}: {}{}", path_, line_, fault.byte > 0 ? fmt::format("byte {}: ", fault.byte) : "", printable(fault.why));
    if (bad_lines_ == dataset::BadLines::stop)
      throw error(ExitCode::data, "{}; correct the line, or leave such lines out with data.bad_lines = \"skip\"",
                  message);
    ++skipped_;
    if (first_skipped_.size() < kMessagesKept) first_skipped_.push_back(message);
  }
  return false;
}

}  // namespace weft::language_model

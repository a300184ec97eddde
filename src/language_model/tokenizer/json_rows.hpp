// SPDX-License-Identifier: Apache-2.0
//
// Rows of a file of JSON Lines: one JSON object per line, of one of these forms (further keys are left out):
//
//   {"text": TEXT}                                  a text
//   {"prompt": TEXT, "completion": TEXT}            a text in two parts; the second counts in the loss
//   {"segments": [{"text": TEXT, "loss": BOOL}]}    a text in parts, as `weft prepare` writes conversations
//
// Blank lines are left out, and so are a byte order mark and the "\r" of "\r\n". A line is bad if it is not JSON (text
// that is not UTF-8, and half a surrogate pair, are not), has another form, or has more than kLongestLine bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"
#include "dataset/tokens/token_settings.hpp"

namespace weft::language_model {

inline constexpr std::size_t kLongestLine = std::size_t{256} << 20;
/// Places in a row at which tokens begin or cease to count: the text before each of them is encoded once more.
inline constexpr std::size_t kMostBorders = 4096;

struct JsonRow {
  enum class Form { text, completion, segments };
  Form form = Form::text;
  std::string text;
  /// Bytes at which counting in the loss begins and ends in turn, ascending: an odd number if the end counts. Of a text
  /// {0}.
  std::vector<std::size_t> borders;
  std::int64_t line = 0;   ///< from 1
  std::string owner = {};  ///< value of the field that names the owner, if one is asked for
};

/// True for an object that a chat template makes a text of: "messages", or a "prompt" that is a list.
bool is_conversation(const SortedJson& object);

/// Takes the row out of an object. Returns why it is none, "" if it is one.
std::string take_row(SortedJson& object, JsonRow& row);

class JsonRowReader {
 public:
  /// The text of the file at `path`, which must outlive the reader. `owner_field`: the key of a string or an integer
  /// that each row must have, and that says whom it belongs to; "": none.
  JsonRowReader(std::string_view text, std::string path, dataset::BadLines bad_lines, std::string owner_field = "");

  /// The next row; false at the end. Throws Error(data) "PATH:LINE: …" for a bad line, unless these are skipped, and
  /// for a conversation ("messages"), which needs a template.
  bool next(JsonRow& row);

  std::int64_t skipped() const { return skipped_; }
  /// Messages about the first lines that were skipped.
  const std::vector<std::string>& first_skipped() const { return first_skipped_; }

 private:
  std::string_view rest_;
  std::string path_;
  dataset::BadLines bad_lines_;
  std::string owner_field_;
  std::size_t mark_ = 0;  // bytes of a byte order mark, in the first line
  std::int64_t line_ = 0, skipped_ = 0;
  std::vector<std::string> first_skipped_;
};

}  // namespace weft::language_model

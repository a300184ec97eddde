// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/token_writer.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "storage/durable.hpp"
#include "storage/token_file.hpp"

namespace weft::dataset {

TokenWriter::TokenWriter(const std::string& directory, std::int64_t vocabulary, std::string tokenizer,
                         std::int64_t tokens_per_file)
    : output_(directory),
      vocabulary_(vocabulary),
      tokens_per_file_(tokens_per_file),
      tokenizer_(std::move(tokenizer)) {}

void TokenWriter::append(std::span<const std::uint32_t> ids, std::int64_t text_bytes,
                         std::span<const std::uint8_t> counted) {
  if (ids.empty()) return;
  documents_.push_back(static_cast<std::int64_t>(ids_.size()));
  text_bytes_.push_back(text_bytes);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  if (counted.empty())
    counted_.resize(ids_.size(), 1);
  else
    counted_.insert(counted_.end(), counted.begin(), counted.end());
  ++written_.documents;
  written_.text_bytes += text_bytes;
  while (static_cast<std::int64_t>(ids_.size()) >= tokens_per_file_) write(static_cast<std::size_t>(tokens_per_file_));
}

void TokenWriter::write(std::size_t count) {
  const auto border = static_cast<std::int64_t>(count);
  const auto end = std::lower_bound(documents_.begin(), documents_.end(), border);
  const auto n = end - documents_.begin();
  const auto bytes_end = text_bytes_.begin() + n;
  // A divided document: its bytes count in proportion.
  const std::int64_t next = end == documents_.end() ? static_cast<std::int64_t>(ids_.size()) : *end;
  std::int64_t bytes = 0, rest = 0;
  for (auto i = text_bytes_.begin(); i != bytes_end; ++i) bytes += *i;
  if (next > border) {
    const std::int64_t start = *(end - 1);
    rest = static_cast<std::int64_t>(static_cast<double>(*(bytes_end - 1)) * static_cast<double>(next - border) /
                                     static_cast<double>(next - start));
    bytes -= rest;
  }
  const std::filesystem::path path = output_.place() / fmt::format("tokens_{:05}.h5", written_.files);
  const std::span marks = std::span(counted_).first(count);
  const bool all_count = std::all_of(marks.begin(), marks.end(), [](std::uint8_t mark) { return mark == 1; });
  storage::write_token_file(path, std::span(ids_).first(count), {documents_.begin(), end}, vocabulary_, bytes,
                            tokenizer_, all_count ? std::span<const std::uint8_t>() : marks);
  ++written_.files;
  written_.tokens += border;
  note_progress();

  ids_.erase(ids_.begin(), ids_.begin() + border);
  counted_.erase(counted_.begin(), counted_.begin() + border);
  documents_.erase(documents_.begin(), end);
  text_bytes_.erase(text_bytes_.begin(), bytes_end);
  for (std::int64_t& start : documents_) start -= border;
  if (next > border) {
    documents_.insert(documents_.begin(), 0);
    text_bytes_.insert(text_bytes_.begin(), rest);
  }
}

TokenWriter::Written TokenWriter::finish() {
  if (!ids_.empty()) write(ids_.size());
  if (written_.tokens == 0)
    throw error(ExitCode::data, "{}: there are no tokens to write (all documents are empty)", output_.path().string());
  storage::write_text(output_.place() / "tokenizer.json", tokenizer_);
  output_.publish();
  return written_;
}

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
#include "language_model/encoder/sentence_encoder.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "language_model/huggingface/sentence_transformers.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "language_model/tokenizer/tokenizer_files.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;

/// Tokens of a forward pass, and texts, of which each has at least one.
constexpr std::int64_t kRows = 4096;

std::int64_t rows_of(std::int64_t longest) { return std::max(kRows, longest); }

/// Throws unless the directory of an encoder has its configuration and its tokeniser.
const fs::path& complete(const fs::path& directory) {
  for (const char* const file : {"config.json", kHuggingFaceTokenizer})
    if (!fs::exists(directory / file))
      throw error(
          ExitCode::data,
          "{}: has no {} (an encoder is a directory that sentence-transformers has saved); correct the path, or "
          "complete it",
          directory.string(), file);
  return directory;
}

Tokenizer tokenizer_of(const fs::path& directory, const EncoderShape& shape) {
  Tokenizer tokenizer = load_tokenizer((directory / kHuggingFaceTokenizer).string(), {}, "the tokeniser of an encoder");
  if (tokenizer.vocabulary_size() > shape.vocabulary)
    throw error(ExitCode::data, "{}: has {} tokens, config.json a vocabulary of {}; is the directory complete?",
                (directory / kHuggingFaceTokenizer).string(), tokenizer.vocabulary_size(), shape.vocabulary);
  return tokenizer;
}

std::int64_t longest_of(const fs::path& directory, const EncoderShape& shape, const Tokenizer& tokenizer) {
  const std::int64_t longest = std::min(shape.positions, require_mean_pooling(directory).value_or(shape.positions)),
                     added = std::ssize(tokenizer.begin()) + std::ssize(tokenizer.end());
  if (longest <= added)
    throw error(ExitCode::usage,
                "{}: texts of at most {} tokens, of which the tokeniser adds {}; nothing of a text is left",
                directory.string(), longest, added);
  return longest;
}

}  // namespace

SentenceEncoder::SentenceEncoder(const fs::path& directory, const kernels::Execution& execution)
    : SentenceEncoder(BertDirectory(complete(directory)), directory, execution) {}

SentenceEncoder::SentenceEncoder(const BertDirectory& files, const fs::path& directory,
                                 const kernels::Execution& execution)
    : directory_(directory),
      execution_(execution),
      tokenizer_(tokenizer_of(directory, files.shape())),
      longest_(longest_of(directory, files.shape(), tokenizer_)),
      encoder_(files, rows_of(longest_), execution),
      host_pooled_(rows_of(longest_)),
      pooled_(rows_of(longest_)) {}

SentenceEncoder::Size SentenceEncoder::size(const fs::path& directory) {
  const BertDirectory files(complete(directory));
  const EncoderShape& shape = files.shape();
  const std::int64_t rows = rows_of(longest_of(directory, shape, tokenizer_of(directory, shape)));
  return {shape.d_model, Encoder::bytes(shape, rows) + rows * static_cast<std::int64_t>(sizeof(kernels::PooledRows))};
}

std::vector<std::uint32_t> SentenceEncoder::ids_of(const std::string& text) {
  std::vector<std::uint32_t> ids(tokenizer_.begin().begin(), tokenizer_.begin().end());
  const std::vector<std::uint32_t> own = tokenizer_.encode(text, "a text to embed");
  const std::int64_t most = longest_ - std::ssize(ids) - std::ssize(tokenizer_.end()),
                     kept = std::min(most, std::ssize(own));
  if (kept < std::ssize(own) && !has_cut_) {
    has_cut_ = true;
    log::warning("{}: a text of {} tokens was cut after {}, and so are other long ones (as sentence-transformers does)",
                 directory_.string(), own.size(), most);
  }
  ids.insert(ids.end(), own.begin(), own.begin() + kept);
  ids.insert(ids.end(), tokenizer_.end().begin(), tokenizer_.end().end());
  return ids;
}

void SentenceEncoder::embed(std::span<const std::string> texts, kernels::Matrix<float> out) {
  if (out.rows != std::ssize(texts) || out.columns != width() || out.stride != out.columns)
    throw error(ExitCode::internal, "embeddings of {} texts do not fit a matrix of {} x {}", texts.size(), out.rows,
                out.columns);
  device::zero(execution_, out.data, out.rows * out.columns * 4);
  std::vector<std::uint32_t> ids;
  std::vector<std::int64_t> sizes;
  const auto run = [&] {
    if (sizes.empty()) return;
    note_progress();
    const kernels::AnyMatrix hidden = encoder_.forward(ids, sizes);
    const kernels::Array<const kernels::PooledRows> pooled{pooled_.data(), std::ssize(sizes)};
    device::copy(execution_, pooled_.data(), host_pooled_.data(),
                 pooled.size * static_cast<std::int64_t>(sizeof(kernels::PooledRows)), device::Direction::to_device);
    kernels::pool_rows(execution_, hidden, pooled, out);
    kernels::fence(execution_);  // host memory is filled again
    ids.clear();
    sizes.clear();
  };
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) continue;
    const std::vector<std::uint32_t> of_text = ids_of(texts[i]);
    if (std::ssize(ids) + std::ssize(of_text) > rows_of(longest_)) run();
    const std::int64_t begin = std::ssize(ids), size = std::ssize(of_text);
    if (size == 0) continue;  // of white space, without added tokens
    host_pooled_.data()[sizes.size()] = {begin, begin + size, static_cast<std::int64_t>(i),
                                         1 / static_cast<float>(size)};
    ids.insert(ids.end(), of_text.begin(), of_text.end());
    sizes.push_back(size);
  }
  run();
}

}  // namespace weft::language_model

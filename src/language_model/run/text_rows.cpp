// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/text_rows.hpp"

#include <algorithm>
#include <exception>
#include <vector>

#include "base/contract.hpp"
#include "dataset/activations/reader.hpp"

namespace weft::language_model {

TextRows::TextRows(const Windows& windows, const TextStream& text, std::int64_t block_rows, MlpRecorder& recorder,
                   const parallel::Communicator* copy)
    : windows_(windows), text_(text), block_windows_(block_rows / windows.length), recorder_(recorder), copy_(copy) {
  WEFT_ASSERT(block_rows % windows.length == 0);
}

void TextRows::read(std::span<const dataset::RowRead> reads) {
  if (is_shared()) {
    round({.reads = std::ssize(reads)}, reads);
    return;
  }
  for (const dataset::RowRead& read : reads) form(read, true);
}

void TextRows::finish() {
  if (is_shared())
    round({.finishes = 1}, {});
  else
    recorder_.finish();
}

void TextRows::conclude() {
  if (!is_shared()) return;
  std::exception_ptr failure;
  for (bool all = false; !all;) {
    try {
      all = round({.concludes = 1}, {});
    } catch (...) {
      // The other ranks have found the same and go on to their own `conclude`.
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

/// Computes the blocks of these rows. keeps: they are copied to the destinations; otherwise they are those of another
/// rank, and only checked.
void TextRows::form(const dataset::RowRead& read, bool keeps) {
  const std::int64_t block_rows = block_windows_ * windows_.length, row_bytes = recorder_.row_bytes(),
                     end = read.row_begin + read.rows;
  for (std::int64_t row = read.row_begin; row < end;) {
    const std::int64_t block = row / block_rows, block_begin = block * block_rows,
                       stop = std::min(end, block_begin + block_rows),
                       first = read.file * windows_.windows_per_file + block * block_windows_,
                       count = std::min(block_windows_, windows_.windows_of(read.file) - block * block_windows_);
    if (!recorder_.holds(text_, first, count)) recorder_.record(text_, windows_.length, first, count);
    const auto at = [&](std::byte* rows) {
      return rows == nullptr ? nullptr : rows + (row - read.row_begin) * row_bytes;
    };
    if (keeps)
      recorder_.copy(row - block_begin, stop - row, at(read.inputs), at(read.targets));
    else
      recorder_.copy(0, 0, nullptr, nullptr);
    row = stop;
  }
}

/// One call of every rank that has a part of the model. Returns true if all of them conclude.
bool TextRows::round(Wish wish, std::span<const dataset::RowRead> reads) {
  const auto n_ranks = static_cast<std::size_t>(copy_->size());
  std::vector<Wish> wishes(n_ranks);
  copy_->all_gather(&wish, wishes.data(), sizeof wish);
  struct Rows {
    std::int64_t file, begin, count;
  };
  std::vector<Rows> own;
  for (const dataset::RowRead& read : reads) own.push_back({read.file, read.row_begin, read.rows});
  std::vector<std::int64_t> bytes;
  std::int64_t total = 0;
  for (const Wish& of_rank : wishes) {
    total += of_rank.reads;
    bytes.push_back(of_rank.reads * std::int64_t{sizeof(Rows)});
  }
  std::vector<Rows> all(static_cast<std::size_t>(total));
  if (total > 0) copy_->all_gather_uneven(own.data(), all.data(), bytes);
  auto next = all.cbegin();
  for (std::size_t rank = 0; rank < n_ranks; ++rank)
    for (std::int64_t i = 0; i < wishes[rank].reads; ++i, ++next) {
      const bool is_own = static_cast<int>(rank) == copy_->rank();
      if (is_own)
        form(reads[static_cast<std::size_t>(i)], true);
      else
        form({next->file, next->begin, next->count, nullptr, nullptr}, false);
    }
  const auto any = [&](std::int64_t Wish::*member) {
    return std::any_of(wishes.begin(), wishes.end(), [&](const Wish& of_rank) { return of_rank.*member != 0; });
  };
  if (any(&Wish::finishes)) recorder_.finish();
  return std::all_of(wishes.begin(), wishes.end(), [](const Wish& of_rank) { return of_rank.concludes != 0; });
}

Windows windows_of(std::int64_t ids, std::int64_t length) {
  const std::int64_t windows = ids / length;
  return {length, windows, std::min(windows, std::max<std::int64_t>(1, kRowsPerFile / length))};
}

dataset::Description describe(const Windows& windows, const ModelSettings& model, kernels::Scalar type) {
  dataset::Description description;
  description.own_layout = true;
  description.hook_inputs = kInputHook;
  description.hook_targets = kOutputHook;
  description.n_layers = model.layers;
  description.d_model = model.d_model;
  description.n_rows = windows.windows * windows.length;
  description.dtype = type;
  for (std::int64_t file = 0; file < windows.files(); ++file) {
    dataset::FileDescription part;
    part.name = fmt::format("part {}", file);
    part.rows = windows.rows_of(file);
    description.files.push_back(part);
  }
  return description;
}

}  // namespace weft::language_model

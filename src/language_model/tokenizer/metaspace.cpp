// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/metaspace.hpp"

namespace weft::language_model {

void Metaspace::split(const Piece& piece, const TextPlace&, const PieceSink& sink) const {
  using Prepend = MetaspaceSettings::Prepend;
  const std::string& mark = settings_.replacement;
  std::string text;
  text.reserve(piece.text.size() + mark.size());
  const bool marked = piece.text.starts_with(' ') || piece.text.starts_with(mark);
  if (!marked && (settings_.prepend == Prepend::always || (settings_.prepend == Prepend::first && piece.at_start)))
    text = mark;
  for (const char c : piece.text)
    if (c == ' ')
      text += mark;
    else
      text += c;
  const std::string_view all = text;
  std::size_t begin = 0;
  while (settings_.splits) {
    const std::size_t end = all.find(mark, begin + 1);
    if (end == all.npos) break;
    sink({all.substr(begin, end - begin), piece.at_start && begin == 0});
    begin = end;
  }
  sink({all.substr(begin), piece.at_start && begin == 0});
}

void PrefixSpace::split(const Piece& piece, const TextPlace&, const PieceSink& sink) const {
  if (piece.text.starts_with(' ')) return sink(piece);
  std::string text(1, ' ');
  text += piece.text;
  sink({text, piece.at_start});
}

void MarkedWords::split(const Piece& piece, const TextPlace&, const PieceSink& sink) const {
  std::size_t begin = 0;
  for (std::size_t at = piece.text.find(mark_, 1); at != piece.text.npos; at = piece.text.find(mark_, at + 1)) {
    if (piece.text.substr(0, at).ends_with(mark_)) continue;
    sink({piece.text.substr(begin, at - begin), piece.at_start && begin == 0});
    begin = at;
  }
  sink({piece.text.substr(begin), piece.at_start && begin == 0});
}

}  // namespace weft::language_model

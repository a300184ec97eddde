// SPDX-License-Identifier: Apache-2.0
// Spaces as a visible character, "▁" in SentencePiece: words begin with it.
#pragma once

#include <string>

#include "language_model/tokenizer/pre_tokeniser.hpp"

namespace weft::language_model {

struct MetaspaceSettings {
  enum class Prepend { always, first, never };

  std::string replacement = "▁";      ///< one character
  Prepend prepend = Prepend::always;  ///< before a text that does not begin with it: every one, or that of the start
  bool splits = true;                 ///< before each replacement
};

class Metaspace : public PreTokeniser {
 public:
  explicit Metaspace(MetaspaceSettings settings) : settings_(std::move(settings)) {}
  void split(const Piece&, const TextPlace&, const PieceSink&) const override;
  /// The part after the cut begins with the replacement, so that nothing is put before it.
  SpaceCuts space_cuts() const override { return settings_.splits ? SpaceCuts::cuts : SpaceCuts::keeps; }

 private:
  MetaspaceSettings settings_;
};

/// Puts a space before a piece that does not begin with one.
class PrefixSpace : public PreTokeniser {
 public:
  void split(const Piece&, const TextPlace&, const PieceSink&) const override;
  SpaceCuts space_cuts() const override { return SpaceCuts::keeps; }
};

/// Cuts before each `mark` that follows another character, for a model that never joins the two.
class MarkedWords : public PreTokeniser {
 public:
  explicit MarkedWords(std::string mark) : mark_(std::move(mark)) {}
  void split(const Piece&, const TextPlace&, const PieceSink&) const override;
  SpaceCuts space_cuts() const override { return SpaceCuts::keeps; }

 private:
  std::string mark_;
};

}  // namespace weft::language_model

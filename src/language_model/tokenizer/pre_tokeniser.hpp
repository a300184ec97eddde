// SPDX-License-Identifier: Apache-2.0
// A step that cuts a text into the pieces from which a model makes ids, one by one.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/text_place.hpp"

namespace weft::language_model {

/// A part of a text; it may be a changed copy that lives as long as the call that it is given to.
struct Piece {
  std::string_view text;  ///< not empty
  bool at_start = true;   ///< it begins where the source begins
};
using PieceSink = std::function<void(const Piece&)>;

/// Whether a text may be cut before a space after a visible ASCII character, so that the pieces of its parts are its
/// own: not if a piece can contain both; yes, as a step cuts there; or if another step does.
enum class SpaceCuts { may_join, keeps, cuts };

class PreTokeniser {
 public:
  virtual ~PreTokeniser() = default;
  /// Calls `sink` with the pieces of a piece, in order. Throws Error(data) that names the place. Thread-safe.
  virtual void split(const Piece&, const TextPlace&, const PieceSink& sink) const = 0;
  virtual SpaceCuts space_cuts() const { return SpaceCuts::may_join; }
};
using PreTokenisers = std::vector<std::unique_ptr<const PreTokeniser>>;

}  // namespace weft::language_model

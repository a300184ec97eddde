// SPDX-License-Identifier: Apache-2.0
// A step that changes a text before it is cut into pieces.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/text_place.hpp"
#include "language_model/tokenizer/unicode.hpp"

namespace weft::language_model {

struct NormalisedText {
  std::string text;      ///< valid UTF-8
  bool at_start = true;  ///< its first character stands for the first one of the source
};

class Normaliser {
 public:
  virtual ~Normaliser() = default;
  /// Changes a text that is not empty. Throws Error(data) that names the place. Thread-safe.
  virtual void apply(NormalisedText&, const TextPlace&) const = 0;
  /// True if the two parts of a text that is cut before a space after a visible ASCII character can be changed alone.
  virtual bool is_local() const { return false; }
};
using Normalisers = std::vector<std::unique_ptr<const Normaliser>>;

/// All of them in order; the text may become empty. Throws Error(data) for a text that grows more than 64 times.
void normalise(const Normalisers&, NormalisedText&, const TextPlace&);

std::unique_ptr<const Normaliser> unicode_normaliser(UnicodeForm);
std::unique_ptr<const Normaliser> lowercase_normaliser();
/// Removes marks; letters are to be decomposed before.
std::unique_ptr<const Normaliser> accent_stripper();
std::unique_ptr<const Normaliser> prepending_normaliser(std::string prefix);
/// Removes white space at the ends.
std::unique_ptr<const Normaliser> stripping_normaliser(bool left, bool right);

}  // namespace weft::language_model

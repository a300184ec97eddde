// SPDX-License-Identifier: Apache-2.0
// The normaliser of BERT.
#pragma once

#include "language_model/tokenizer/normaliser.hpp"

namespace weft::language_model {

class BertNormaliser : public Normaliser {
 public:
  struct Settings {
    bool clean_text = true;            ///< control characters are removed, white space becomes spaces
    bool handle_chinese_chars = true;  ///< spaces around ideographs
    bool strip_accents = true;
    bool lowercase = true;
  };

  explicit BertNormaliser(Settings settings) : settings_(settings) {}
  void apply(NormalisedText&, const TextPlace&) const override;
  bool is_local() const override { return true; }

 private:
  Settings settings_;
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/normaliser.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

constexpr std::size_t kMostGrowth = 64, kSmallText = 4096;

class InUnicodeForm : public Normaliser {
 public:
  explicit InUnicodeForm(UnicodeForm form) : form_(form) {}
  void apply(NormalisedText& text, const TextPlace&) const override { text.text = normal_form(text.text, form_); }
  bool is_local() const override { return true; }

 private:
  UnicodeForm form_;
};

class Lowercase : public Normaliser {
 public:
  void apply(NormalisedText& text, const TextPlace&) const override { text.text = lower_case(text.text); }
  bool is_local() const override { return true; }
};

class StripAccents : public Normaliser {
 public:
  void apply(NormalisedText& text, const TextPlace&) const override {
    std::string kept;
    for (std::size_t at = 0; at < text.text.size();) {
      const Character next = first_character(std::string_view(text.text).substr(at));
      if (!is_mark(next.code))
        kept.append(text.text, at, next.bytes);
      else if (at == 0)
        text.at_start = false;
      at += next.bytes;
    }
    text.text = std::move(kept);
  }
  bool is_local() const override { return true; }
};

class PrependText : public Normaliser {
 public:
  explicit PrependText(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply(NormalisedText& text, const TextPlace&) const override { text.text.insert(0, prefix_); }

 private:
  std::string prefix_;
};

class StripEnds : public Normaliser {
 public:
  StripEnds(bool left, bool right) : left_(left), right_(right) {}
  void apply(NormalisedText& text, const TextPlace&) const override {
    const std::string_view all = text.text;
    std::size_t begin = 0, end = 0;  // of the text between the first and the last character that is no white space
    bool found = false;
    for (std::size_t at = 0; at < all.size();) {
      const Character next = first_character(all.substr(at));
      if (!is_white_space(next.code)) {
        if (!found) begin = at;
        found = true;
        end = at + next.bytes;
      }
      at += next.bytes;
    }
    if (!found) begin = all.size();
    if (!left_) begin = 0;
    if (!right_) end = all.size();
    if (begin > 0) text.at_start = false;
    text.text = begin < end ? std::string(all.substr(begin, end - begin)) : "";
  }

 private:
  bool left_, right_;
};

}  // namespace

void normalise(const Normalisers& normalisers, NormalisedText& text, const TextPlace& place) {
  const std::size_t most = kMostGrowth * text.text.size() + kSmallText;
  for (const auto& normaliser : normalisers) {
    if (text.text.empty()) return;
    normaliser->apply(text, place);
    if (text.text.size() > most)
      throw error(ExitCode::data,
                  "{}: {}: the normaliser makes a text more than {} times as long (not supported); is the tokeniser "
                  "complete?",
                  place.source, place.byte_of(place.text), kMostGrowth);
  }
}

std::unique_ptr<const Normaliser> unicode_normaliser(UnicodeForm form) { return std::make_unique<InUnicodeForm>(form); }
std::unique_ptr<const Normaliser> lowercase_normaliser() { return std::make_unique<Lowercase>(); }
std::unique_ptr<const Normaliser> accent_stripper() { return std::make_unique<StripAccents>(); }
std::unique_ptr<const Normaliser> prepending_normaliser(std::string prefix) {
  return std::make_unique<PrependText>(std::move(prefix));
}
std::unique_ptr<const Normaliser> stripping_normaliser(bool left, bool right) {
  return std::make_unique<StripEnds>(left, right);
}

}  // namespace weft::language_model

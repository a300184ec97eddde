// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/token_decoder.hpp"

#include <utility>

namespace weft::language_model {
namespace {

void replace_all(std::string& text, std::string_view old_part, std::string_view new_part) {
  for (std::size_t at = text.find(old_part); at != text.npos; at = text.find(old_part, at + new_part.size()))
    text.replace(at, old_part.size(), new_part);
}

class ReplacingDecoder : public DecoderStep {
 public:
  explicit ReplacingDecoder(Replace replace) : replace_(std::move(replace)) {}
  void apply(std::string& token, bool) const override {
    NormalisedText text{std::move(token)};
    if (!text.text.empty()) replace_.apply(text, {"a token", {}});
    token = std::move(text.text);
  }

 private:
  Replace replace_;
};

class ByteFallbackDecoder : public DecoderStep {
 public:
  void apply(std::string& token, bool) const override {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return;
    int byte = 0;
    for (const char digit : token.substr(3, 2)) {
      const std::size_t value = std::string_view("0123456789abcdefABCDEF").find(digit);
      if (value == std::string_view::npos) return;
      byte = byte * 16 + static_cast<int>(value < 16 ? value : value - 6);
    }
    token = std::string(1, static_cast<char>(byte));
  }
};

class StrippingDecoder : public DecoderStep {
 public:
  StrippingDecoder(std::string content, std::size_t start, std::size_t stop, bool first_alone)
      : content_(std::move(content)), start_(start), stop_(stop), first_alone_(first_alone) {}
  void apply(std::string& token, bool first) const override {
    if (first_alone_ && !first) return;
    for (std::size_t i = 0; i < start_ && token.starts_with(content_); ++i) token.erase(0, content_.size());
    for (std::size_t i = 0; i < stop_ && token.ends_with(content_); ++i) token.erase(token.size() - content_.size());
  }

 private:
  std::string content_;
  std::size_t start_, stop_;
  bool first_alone_;
};

class MetaspaceDecoder : public DecoderStep {
 public:
  explicit MetaspaceDecoder(const MetaspaceSettings& settings)
      : replacement_(settings.replacement), removes_first_(settings.prepend != MetaspaceSettings::Prepend::never) {}
  void apply(std::string& token, bool first) const override {
    replace_all(token, replacement_, first && removes_first_ ? "" : " ");
  }

 private:
  std::string replacement_;
  bool removes_first_;
};

class WordPieceDecoder : public DecoderStep {
 public:
  WordPieceDecoder(std::string prefix, bool cleanup) : prefix_(std::move(prefix)), cleanup_(cleanup) {}
  void apply(std::string& token, bool first) const override {
    if (!first) {
      if (token.starts_with(prefix_))
        token.erase(0, prefix_.size());
      else
        token.insert(token.begin(), ' ');
    }
    if (!cleanup_) return;
    constexpr std::pair<const char*, const char*> changes[] = {
        {" .", "."},   {" ?", "?"},           {" !", "!"},   {" ,", ","},     {" ' ", "'"},   {" n't", "n't"},
        {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    for (const auto& [old_part, new_part] : changes) replace_all(token, old_part, new_part);
  }

 private:
  std::string prefix_;
  bool cleanup_;
};

class SpacingDecoder : public DecoderStep {
 public:
  void apply(std::string& token, bool first) const override {
    if (!first) token.insert(token.begin(), ' ');
  }
};

}  // namespace

std::unique_ptr<const DecoderStep> replacing_decoder(Replace replace) {
  return std::make_unique<ReplacingDecoder>(std::move(replace));
}
std::unique_ptr<const DecoderStep> byte_fallback_decoder() { return std::make_unique<ByteFallbackDecoder>(); }
std::unique_ptr<const DecoderStep> stripping_decoder(std::string content, std::size_t start, std::size_t stop,
                                                     bool first_alone) {
  return std::make_unique<StrippingDecoder>(std::move(content), start, stop, first_alone);
}
std::unique_ptr<const DecoderStep> metaspace_decoder(const MetaspaceSettings& settings) {
  return std::make_unique<MetaspaceDecoder>(settings);
}
std::unique_ptr<const DecoderStep> wordpiece_decoder(std::string prefix, bool cleanup) {
  return std::make_unique<WordPieceDecoder>(std::move(prefix), cleanup);
}
std::unique_ptr<const DecoderStep> spacing_decoder() { return std::make_unique<SpacingDecoder>(); }

}  // namespace weft::language_model

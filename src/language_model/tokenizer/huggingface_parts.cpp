// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/huggingface_parts.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "language_model/tokenizer/bert_normaliser.hpp"
#include "language_model/tokenizer/metaspace.hpp"
#include "language_model/tokenizer/pattern.hpp"
#include "language_model/tokenizer/precompiled.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;

constexpr std::size_t kLongestContent = 256;
// \w of the expressions that the library itself uses: is_word_character (unicode.hpp).
#define WEFT_WORD                                                                               \
  "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200c}\\x{200d}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}" \
  "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"
constexpr const char* kWordsAndSymbols = "[" WEFT_WORD "]+|[^\\s" WEFT_WORD "]+";
#undef WEFT_WORD
constexpr const char* kPunctuation = "[!-/:-@\\[-`{-~\\p{P}]";

/// A pattern {"Regex": …} or {"String": …}.
struct ReadPattern {
  std::string text;
  bool is_expression;
};
ReadPattern pattern_of(const JsonPart& step) {
  const json* const pattern = step.member("pattern");
  if (pattern != nullptr) {
    const JsonPart part(*pattern, step.source(), "pattern.");
    if (std::string text = part.text("Regex"); !text.empty()) return {std::move(text), true};
    if (std::string text = part.text("String"); !text.empty()) return {std::move(text), false};
  }
  throw step.refuse("has a {} without a pattern {{\"Regex\"}} or {{\"String\"}}", printable(step.type()));
}

/// A text that is put into texts.
std::string content_of(const JsonPart& step, const char* name) {
  std::string content = step.text(name);
  if (content.size() > kLongestContent)
    throw step.refuse("has a {} with {} bytes of \"{}\" (at most {} are accepted)", step.type(), content.size(), name,
                      kLongestContent);
  return content;
}

Replace replace_of(const JsonPart& step) {
  step.require_known({"type", "pattern", "content"});
  ReadPattern pattern = pattern_of(step);
  std::string content = content_of(step, "content");
  if (pattern.is_expression) return {Expression(pattern.text, step.source()), std::move(content)};
  return {std::move(pattern.text), std::move(content)};
}

MetaspaceSettings metaspace_of(const JsonPart& step) {
  step.require_known({"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
  MetaspaceSettings settings;
  settings.replacement = step.text("replacement");
  if (settings.replacement.empty() || first_character(settings.replacement).bytes != settings.replacement.size())
    throw step.refuse("has a Metaspace whose replacement is not one character");
  const std::string scheme = step.text("prepend_scheme", "always");
  using Prepend = MetaspaceSettings::Prepend;
  if (scheme != "always" && scheme != "first" && scheme != "never")
    throw step.refuse("has a Metaspace with the prepend_scheme \"{}\" (always, first or never)", printable(scheme));
  settings.prepend = scheme == "always" ? Prepend::always : scheme == "first" ? Prepend::first : Prepend::never;
  if (!step.flag("add_prefix_space", true)) settings.prepend = Prepend::never;
  settings.splits = step.flag("split", true);
  return settings;
}

std::unique_ptr<const Normaliser> bert_normaliser(const JsonPart& step) {
  step.require_known({"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
  BertNormaliser::Settings settings;
  settings.clean_text = step.flag("clean_text", true);
  settings.handle_chinese_chars = step.flag("handle_chinese_chars", true);
  settings.lowercase = step.flag("lowercase", true);
  settings.strip_accents = step.flag("strip_accents", settings.lowercase);
  return std::make_unique<BertNormaliser>(settings);
}

}  // namespace

Normalisers normalisers_of(const JsonPart& normalizer) {
  constexpr std::pair<const char*, UnicodeForm> forms[] = {
      {"NFC", UnicodeForm::nfc}, {"NFD", UnicodeForm::nfd}, {"NFKC", UnicodeForm::nfkc}, {"NFKD", UnicodeForm::nfkd}};
  Normalisers all;
  for (const JsonPart& step : normalizer.steps("normalizers")) {
    const std::string type = step.type();
    const auto* const form =
        std::find_if(std::begin(forms), std::end(forms), [&](const auto& one) { return type == one.first; });
    if (form != std::end(forms)) {
      step.require_known({"type"});
      all.push_back(unicode_normaliser(form->second));
    } else if (type == "Lowercase") {
      step.require_known({"type"});
      all.push_back(lowercase_normaliser());
    } else if (type == "StripAccents") {
      step.require_known({"type"});
      all.push_back(accent_stripper());
    } else if (type == "Strip") {
      step.require_known({"type", "strip_left", "strip_right"});
      all.push_back(stripping_normaliser(step.flag("strip_left"), step.flag("strip_right")));
    } else if (type == "Prepend") {
      step.require_known({"type", "prepend"});
      all.push_back(prepending_normaliser(content_of(step, "prepend")));
    } else if (type == "Replace") {
      all.push_back(std::make_unique<Replace>(replace_of(step)));
    } else if (type == "Precompiled") {
      step.require_known({"type", "precompiled_charsmap"});
      all.push_back(std::make_unique<Precompiled>(step.text("precompiled_charsmap"), step.source()));
    } else if (type == "BertNormalizer") {
      all.push_back(bert_normaliser(step));
    } else {
      throw step.refuse(
          "has the normaliser \"{}\" (not supported); if the texts are normalised already, write \"normalizer\": null "
          "in a copy of the file",
          printable(type));
    }
  }
  return all;
}

namespace {

SplitRule split_of_step(const JsonPart& step) {
  step.require_known({"type", "pattern", "behavior", "invert"});
  const ReadPattern pattern = pattern_of(step);
  SplitRule rule{pattern.is_expression ? pattern_name(pattern.text) : literal_pattern(pattern.text)};
  const std::string behavior = step.text("behavior");
  rule.inverted = step.flag("invert");
  constexpr std::pair<const char*, Cut> cuts[] = {{"Isolated", Cut::isolated},
                                                  {"Removed", Cut::removed},
                                                  {"MergedWithPrevious", Cut::with_previous},
                                                  {"MergedWithNext", Cut::with_next},
                                                  {"Contiguous", Cut::runs}};
  const auto* const cut =
      std::find_if(std::begin(cuts), std::end(cuts), [&](const auto& one) { return behavior == one.first; });
  if (cut == std::end(cuts)) throw step.refuse("has a Split with the behavior \"{}\" (not known)", printable(behavior));
  rule.cut = cut->second;
  if (rule.cut == Cut::isolated) rule.inverted = false;
  if (rule.cut == Cut::removed && rule.inverted) rule = {rule.pattern, true};
  return rule;
}

SplitRule punctuation_of(const JsonPart& step) {
  step.require_known({"type", "behavior"});
  if (const std::string behavior = step.text("behavior", "Isolated"); behavior != "Isolated")
    throw step.refuse("has a Punctuation with the behavior \"{}\" (only Isolated is supported)", printable(behavior));
  return {kPunctuation};
}

}  // namespace

PreTokeniserParts pre_tokenisers_of(const JsonPart& pre_tokenizer) {
  PreTokeniserParts parts;
  std::vector<SplitRule> rules;  // in a row
  const auto end_row = [&] {
    if (!rules.empty()) parts.steps.push_back(std::make_unique<Splitter>(rules, pre_tokenizer.source()));
    parts.rules.insert(parts.rules.end(), rules.begin(), rules.end());
    rules.clear();
  };
  const auto add = [&](std::unique_ptr<const PreTokeniser> step) {
    end_row();
    parts.has_rules_alone = false;
    parts.steps.push_back(std::move(step));
  };
  for (const JsonPart& step : pre_tokenizer.steps("pretokenizers")) {
    const std::string type = step.type();
    if (parts.is_byte_level)
      throw step.refuse("has the pre-tokeniser \"{}\" after ByteLevel (not supported)", printable(type));
    if (type == "Split") {
      rules.push_back(split_of_step(step));
    } else if (type == "Digits") {
      step.require_known({"type", "individual_digits"});
      rules.push_back({step.flag("individual_digits") ? kSingleDigits : kRunsOfDigits});
    } else if (type == "ByteLevel") {
      step.require_known({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      parts.is_byte_level = true;
      if (step.flag("add_prefix_space", true)) add(std::make_unique<PrefixSpace>());
      if (step.flag("use_regex", true)) rules.push_back({"gpt2"});
    } else if (type == "Metaspace") {
      add(std::make_unique<Metaspace>(metaspace_of(step)));
    } else if (type == "Whitespace") {
      step.require_known({"type"});
      rules.push_back({kWordsAndSymbols, false, Cut::removed, true});
    } else if (type == "WhitespaceSplit") {
      step.require_known({"type"});
      rules.push_back({kWhiteSpace, false, Cut::removed});
    } else if (type == "Punctuation") {
      rules.push_back(punctuation_of(step));
    } else if (type == "BertPreTokenizer") {
      step.require_known({"type"});
      rules.push_back({kWhiteSpace, false, Cut::removed});
      rules.push_back({kPunctuation});
    } else {
      throw step.unsupported("pre-tokeniser");
    }
  }
  end_row();
  return parts;
}

void require_byte_level_decoder(const JsonPart& decoder) {
  for (const JsonPart& step : decoder.steps("decoders"))
    if (step.type() != "ByteLevel") throw step.unsupported("decoder");
}

Decoder decoder_of(const JsonPart& decoder) {
  constexpr std::size_t most_stripped = 1024;
  Decoder all;
  bool has_bytes = false, is_fused = false;
  for (const JsonPart& step : decoder.steps("decoders")) {
    const std::string type = step.type();
    // Steps after these would change texts of several tokens, the first of which may still be incomplete.
    if ((is_fused && type != "Fuse" && type != "Strip") || (has_bytes && !is_fused && type != "Fuse"))
      throw step.refuse("has the decoder \"{}\" after {} (not supported)", printable(type),
                        is_fused ? "Fuse" : "ByteFallback");
    if (type == "Replace") {
      all.push_back(replacing_decoder(replace_of(step)));
    } else if (type == "ByteFallback") {
      step.require_known({"type"});
      all.push_back(byte_fallback_decoder());
      has_bytes = true;
    } else if (type == "Fuse") {
      step.require_known({"type"});
      is_fused = true;
    } else if (type == "Strip") {
      step.require_known({"type", "content", "start", "stop"});
      const std::string content = step.text("content");
      if (content.empty() || first_character(content).bytes != content.size())
        throw step.refuse("has a decoder Strip whose content is not one character");
      const std::size_t start = step.number("start", most_stripped), stop = step.number("stop", most_stripped);
      if (is_fused && (start > 1 || stop > 0))
        throw step.refuse("has the decoder Strip after Fuse with start {} and stop {} (1 and 0 at most are supported)",
                          start, stop);
      all.push_back(stripping_decoder(content, start, stop, is_fused));
    } else if (type == "Metaspace") {
      all.push_back(metaspace_decoder(metaspace_of(step)));
    } else if (type == "WordPiece") {
      step.require_known({"type", "prefix", "cleanup"});
      all.push_back(wordpiece_decoder(step.text("prefix", "##"), step.flag("cleanup", true)));
    } else {
      throw step.unsupported("decoder");
    }
  }
  return all;
}

namespace {

std::uint32_t special_id(const JsonPart& step, const json& value, const std::string& token) {
  if (!value.is_number_unsigned() || value >= kMostTokens)
    throw step.refuse("the id of \"{}\" is not an integer below {}", printable(token), kMostTokens);
  return value.get<std::uint32_t>();
}

void add_template(const JsonPart& step, std::vector<std::uint32_t>& begin, std::vector<std::uint32_t>& end) {
  step.require_known({"type", "single", "pair", "special_tokens"});
  const JsonPart special = step.object("special_tokens");
  int texts = 0;
  for (const json& piece : step.list("single")) {
    const JsonPart part(piece, step.source(), "post_processor.single.");
    if (part.member("Sequence") != nullptr) {
      if (part.object("Sequence").text("id") != "A")
        throw step.refuse("its post-processor has a template of several texts for one");
      ++texts;
      continue;
    }
    const std::string name = part.member("SpecialToken") == nullptr ? "" : part.object("SpecialToken").text("id");
    if (name.empty() || special.member(name) == nullptr)
      throw step.refuse("its post-processor has a template with the part {} that is not known",
                        printable(piece.dump()));
    const JsonPart token = special.object(name);
    for (const json& id : token.list("ids")) (texts == 0 ? begin : end).push_back(special_id(step, id, name));
  }
  if (texts != 1) throw step.refuse("its post-processor has a template that contains the text {} times", texts);
}

/// Id of a pair of token and id, ["<s>", 0].
std::uint32_t token_and_id(const JsonPart& step, const char* name) {
  const json& pair = step.list(name);
  if (pair.size() != 2 || !pair[0].is_string())
    throw step.refuse("its post-processor has a \"{}\" without an id", name);
  return special_id(step, pair[1], pair[0].get<std::string>());
}

}  // namespace

SpecialTokens special_tokens_of(const JsonPart& post_processor) {
  SpecialTokens tokens;
  for (const JsonPart& step : post_processor.steps("processors")) {
    const std::string type = step.type();
    std::vector<std::uint32_t> begin, end;
    if (type == "ByteLevel") continue;  // changes offsets alone
    if (type == "TemplateProcessing") {
      add_template(step, begin, end);
    } else if (type == "RobertaProcessing" || type == "BertProcessing") {
      begin.push_back(token_and_id(step, "cls"));
      end.push_back(token_and_id(step, "sep"));
    } else {
      throw step.unsupported("post-processor");
    }
    tokens.begin.insert(tokens.begin.begin(), begin.begin(), begin.end());
    tokens.end.insert(tokens.end.end(), end.begin(), end.end());
  }
  return tokens;
}

}  // namespace weft::language_model

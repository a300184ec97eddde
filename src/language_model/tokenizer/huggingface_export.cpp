// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/huggingface_export.hpp"

#include "base/text.hpp"
#include "language_model/tokenizer/byte_alphabet.hpp"

namespace weft::language_model {

using nlohmann::json;

namespace {

json byte_level(bool splits) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", splits}};
}
json split_of(const SplitRule& rule) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", published_pattern(rule.pattern)}}},
          {"behavior", rule.covers_text ? "Removed" : "Isolated"},
          {"invert", rule.covers_text}};
}
json added_token(std::uint32_t id, const std::string& content, bool special, bool normalized) {
  return {{"id", id},        {"content", content},       {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", normalized}, {"special", special}};
}

/// The post-processor that adds these ids to a text; null: none.
json template_of(const SpecialTokens& special, const BpeSettings& model, const std::vector<AddedToken>& added_tokens) {
  if (special.begin.empty() && special.end.empty()) return nullptr;
  json names = json::object();
  const auto pieces = [&](const char* sequence, int type) {
    json list = json::array();
    const auto add = [&](const std::vector<std::uint32_t>& ids) {
      for (const std::uint32_t id : ids) {
        std::string name = to_alphabet(id < model.tokens.size() ? model.tokens[id] : "");
        for (const AddedToken& added : added_tokens)
          if (added.id == id) name = added.content;
        names[name] = {{"id", name}, {"ids", {id}}, {"tokens", {name}}};
        list.push_back({{"SpecialToken", {{"id", name}, {"type_id", type}}}});
      }
    };
    add(special.begin);
    list.push_back({{"Sequence", {{"id", sequence}, {"type_id", type}}}});
    add(special.end);
    return list;
  };
  const json single = pieces("A", 0);
  json pair = single;
  for (const json& piece : pieces("B", 1)) pair.push_back(piece);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", names}};
}

json file_of(json added, json pre_tokenizer, json post_processor, json decoder, json model) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", std::move(added)},
          {"normalizer", nullptr},
          {"pre_tokenizer", std::move(pre_tokenizer)},
          {"post_processor", std::move(post_processor)},
          {"decoder", std::move(decoder)},
          {"model", std::move(model)}};
}
json bpe_model(json vocabulary, json merges, bool ignore_merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", ignore_merges},
          {"vocab", std::move(vocabulary)},
          {"merges", std::move(merges)}};
}

}  // namespace

json huggingface_of_bpe(const std::vector<SplitRule>& rules, const BpeSettings& model,
                        const std::vector<AddedToken>& added_tokens, const SpecialTokens& special) {
  json vocabulary = json::object(), merges = json::array(), added = json::array(), splits = json::array();
  for (std::size_t id = 0; id < model.tokens.size(); ++id)
    if (!model.tokens[id].empty()) vocabulary[to_alphabet(model.tokens[id])] = id;
  for (const auto& [left, right] : model.merges)
    merges.push_back(to_alphabet(model.tokens[left]) + " " + to_alphabet(model.tokens[right]));
  for (const AddedToken& token : added_tokens) {
    vocabulary[token.content] = token.id;  // that the library gives it this id
    added.push_back(added_token(token.id, token.content, token.special, token.normalized));
  }
  for (const SplitRule& rule : rules) splits.push_back(split_of(rule));
  splits.push_back(byte_level(false));
  return file_of(added, {{"type", "Sequence"}, {"pretokenizers", splits}}, template_of(special, model, added_tokens),
                 byte_level(true), bpe_model(vocabulary, merges, model.ignore_merges));
}

json huggingface_of_characters(const std::vector<long>& characters, const std::vector<std::string>& symbols,
                               const std::string& unknown) {
  json vocabulary = json::object();
  std::size_t id = 0;
  for (const long code : characters) {
    std::string character;
    append_character(character, code);
    vocabulary[character] = id++;
  }
  for (const std::string& symbol : symbols) vocabulary[symbol] = id++;
  // If the vocabulary has no unknown symbol, an unknown character is an error in the library too.
  return file_of(json::array(), split_of({"[\\s\\S]"}), nullptr, {{"type", "Fuse"}},
                 {{"type", "WordLevel"}, {"vocab", vocabulary}, {"unk_token", unknown}});
}

json huggingface_of_bytes(const std::vector<std::string>& symbols) {
  json vocabulary = json::object();
  std::uint32_t id = 0;
  for (; id < 256; ++id) vocabulary[to_alphabet(std::string(1, static_cast<char>(id)))] = id;
  for (const std::string& symbol : symbols) vocabulary[symbol] = id++;
  return file_of(json::array(), byte_level(false), nullptr, byte_level(true),
                 bpe_model(vocabulary, json::array(), false));
}

}  // namespace weft::language_model

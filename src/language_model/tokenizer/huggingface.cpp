// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/huggingface.hpp"

#include <algorithm>
#include <initializer_list>
#include <unordered_map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "language_model/tokenizer/pattern.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;

constexpr std::size_t kMostTokens = std::size_t{1} << 22;

class Import {
 public:
  Import(const json& file, std::string_view source) : file_(file), source_(source) {}

  Bpe result() {
    require_known(file_, "",
                  {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                   "decoder", "model"});
    if (const json* normalizer = member(file_, "normalizer"))
      throw refuse(
          "has the normaliser \"{}\" (not supported); if the texts are normalised already, write \"normalizer\": null "
          "in "
          "a copy of the file",
          printable(text(*normalizer, "type")));
    pre_tokenizer();
    decoder();
    const json& model = object(file_, "model");
    if (const std::string type = text(model, "type"); type != "BPE" && !type.empty())
      throw refuse("has a model of type {} (only BPE is supported)", printable(type));
    require_known(model, "model.",
                  {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                   "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (const json* dropout = member(model, "dropout"); dropout != nullptr && *dropout != 0)
      throw refuse("has BPE dropout (not supported)");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!text(model, name).empty()) throw refuse("has a {} (not supported)", name);
    if (flag(model, "byte_fallback")) throw refuse("has byte_fallback (only byte-level BPE is supported)");
    model_.ignore_merges = flag(model, "ignore_merges");
    vocabulary(object(model, "vocab"));
    merges(list(model, "merges"));
    for (int byte = 0; byte < 256; ++byte)
      if (const std::string token = to_alphabet(std::string(1, static_cast<char>(byte)));
          !ids_.contains(token) && !text(model, "unk_token").empty())
        throw refuse("has no token for byte 0x{:02x}, which becomes the unk_token \"{}\" (not supported)", byte,
                     printable(text(model, "unk_token")));
    return std::move(model_);
  }

  SpecialTokens special_tokens() const {
    SpecialTokens tokens;
    if (const json* processor = member(file_, "post_processor")) add_processor(*processor, tokens);
    return tokens;
  }

 private:
  template <class... Args>
  Error refuse(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::data, "{}: {}", source_, fmt::format(format, std::forward<Args>(args)...));
  }
  Error unsupported(const char* what, const json& part) const {
    return refuse("has the {} \"{}\" (not supported)", what, printable(text(part, "type")));
  }

  /// Member of an object; null if it is missing or null.
  static const json* member(const json& parent, const char* name) {
    if (!parent.is_object()) return nullptr;
    const auto found = parent.find(name);
    return found == parent.end() || found->is_null() ? nullptr : &*found;
  }
  static std::string text(const json& parent, const char* name) {
    const json* found = member(parent, name);
    return found != nullptr && found->is_string() ? found->get<std::string>() : std::string();
  }
  static bool flag(const json& parent, const char* name, bool initial = false) {
    const json* found = member(parent, name);
    return found != nullptr && found->is_boolean() ? found->get<bool>() : initial;
  }
  const json& object(const json& parent, const char* name) const {
    const json* found = member(parent, name);
    if (found == nullptr || !found->is_object()) throw refuse("\"{}\" is missing; is it a tokenizer.json?", name);
    return *found;
  }
  const json& list(const json& parent, const char* name) const {
    const json* found = member(parent, name);
    if (found == nullptr || !found->is_array()) throw refuse("\"{}\" is missing; is it a tokenizer.json?", name);
    return *found;
  }

  void require_known(const json& parent, const char* where, std::initializer_list<std::string_view> known) const {
    for (const auto& [key, value] : parent.items())
      if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end())
        throw refuse("has the key \"{}{}\" (not known; it could change the ids)", where, printable(key));
  }
  /// The parts of a Sequence, or the part alone.
  std::vector<const json*> steps(const json& part, const char* name) const {
    if (text(part, "type") != "Sequence") return {&part};
    std::vector<const json*> all;
    for (const json& step : list(part, name)) all.push_back(&step);
    return all;
  }

  /// Reads the pre-tokeniser: Splits and Digits, then ByteLevel, which splits like GPT-2 with use_regex.
  void pre_tokenizer() {
    const json* pre = member(file_, "pre_tokenizer");
    if (pre == nullptr) throw refuse("has no pre-tokeniser (only byte-level BPE is supported)");
    bool byte_level = false;
    for (const json* step : steps(*pre, "pretokenizers")) {
      const std::string type = text(*step, "type");
      if (byte_level) {
        throw refuse("has the pre-tokeniser \"{}\" after ByteLevel (not supported)", printable(type));
      } else if (type == "Split") {
        require_known(*step, "pre_tokenizer.", {"type", "pattern", "behavior", "invert"});
        split(*step);
      } else if (type == "Digits") {
        require_known(*step, "pre_tokenizer.", {"type", "individual_digits"});
        model_.splits.push_back({flag(*step, "individual_digits") ? kSingleDigits : kRunsOfDigits});
      } else if (type == "ByteLevel") {
        require_known(*step, "pre_tokenizer.", {"type", "add_prefix_space", "trim_offsets", "use_regex"});
        byte_level = true;
        if (flag(*step, "add_prefix_space", true)) throw refuse("has add_prefix_space (not supported)");
        if (flag(*step, "use_regex", true)) model_.splits.push_back({"gpt2"});
      } else {
        throw unsupported("pre-tokeniser", *step);
      }
    }
    if (!byte_level) throw refuse("has no byte-level pre-tokeniser (only byte-level BPE is supported)");
  }

  void split(const json& step) {
    const json* expression = member(step, "pattern");
    std::string pattern = expression == nullptr ? "" : text(*expression, "Regex");
    if (pattern.empty() && expression != nullptr) pattern = literal_pattern(text(*expression, "String"));
    if (pattern.empty()) throw refuse("has a Split without a pattern {{\"Regex\"}} or {{\"String\"}}");
    const std::string behavior = text(step, "behavior");
    const bool only_matches = behavior == "Removed" && flag(step, "invert");
    if (behavior != "Isolated" && !only_matches)
      throw refuse("has a Split with behavior {}{} (Isolated, or Removed with invert, is supported)",
                   printable(behavior), flag(step, "invert") ? " and invert" : "");
    model_.splits.push_back({pattern_name(pattern), only_matches});
  }

  /// Checks the decoder. It has no effect on ids; detokenisation is that of byte-level BPE.
  void decoder() const {
    const json* decoder = member(file_, "decoder");
    if (decoder == nullptr) return;
    for (const json* step : steps(*decoder, "decoders"))
      if (text(*step, "type") != "ByteLevel") throw unsupported("decoder", *step);
  }

  /// Adds the ids that a post-processor adds to a text.
  void add_processor(const json& processor, SpecialTokens& tokens) const {
    for (const json* step : steps(processor, "processors")) {
      const std::string type = text(*step, "type");
      std::vector<std::uint32_t> begin, end;
      if (type == "ByteLevel") continue;  // changes offsets alone
      if (type == "TemplateProcessing") {
        require_known(*step, "post_processor.", {"type", "single", "pair", "special_tokens"});
        add_template(*step, begin, end);
      } else if (type == "RobertaProcessing" || type == "BertProcessing") {
        begin.push_back(token_and_id(*step, "cls"));
        end.push_back(token_and_id(*step, "sep"));
      } else {
        throw unsupported("post-processor", *step);
      }
      tokens.begin.insert(tokens.begin.begin(), begin.begin(), begin.end());
      tokens.end.insert(tokens.end.end(), end.begin(), end.end());
    }
  }

  void add_template(const json& step, std::vector<std::uint32_t>& begin, std::vector<std::uint32_t>& end) const {
    const json& special = object(step, "special_tokens");
    int texts = 0;
    for (const json& piece : list(step, "single")) {
      if (const json* sequence = member(piece, "Sequence")) {
        if (text(*sequence, "id") != "A") throw refuse("its post-processor has a template of several texts for one");
        ++texts;
        continue;
      }
      const json* token = member(piece, "SpecialToken");
      const std::string name = token == nullptr ? "" : text(*token, "id");
      const json* entry = member(special, name.c_str());
      const json* ids = entry == nullptr ? nullptr : member(*entry, "ids");
      if (name.empty() || ids == nullptr || !ids->is_array())
        throw refuse("its post-processor has a template with the part {} that is not known", printable(piece.dump()));
      for (const json& id : *ids) (texts == 0 ? begin : end).push_back(static_cast<std::uint32_t>(id_of(id, name)));
    }
    if (texts != 1) throw refuse("its post-processor has a template that contains the text {} times", texts);
  }
  /// Id of a pair of token and id, ["<s>", 0].
  std::uint32_t token_and_id(const json& step, const char* name) const {
    const json& pair = list(step, name);
    if (pair.size() != 2 || !pair[0].is_string()) throw refuse("its post-processor has a \"{}\" without an id", name);
    return static_cast<std::uint32_t>(id_of(pair[1], pair[0].get<std::string>()));
  }

  std::size_t id_of(const json& value, const std::string& token) const {
    if (!value.is_number_unsigned() || value >= kMostTokens)
      throw refuse("the id of \"{}\" is not an integer below {}", printable(token), kMostTokens);
    return value.get<std::size_t>();
  }
  void place(std::size_t id) {
    if (id >= model_.tokens.size()) model_.tokens.resize(id + 1);
  }

  void vocabulary(const json& vocabulary) {
    // Ids without a gap, checked by BpeEncoder: there are as many as entries.
    const json* added = member(file_, "added_tokens");
    std::unordered_map<std::string, Bpe::Added> contents;
    if (added != nullptr) {
      if (!added->is_array()) throw refuse("\"added_tokens\" is not a list");
      for (const json& token : *added) {
        const std::string content = text(token, "content");
        const json* id = member(token, "id");
        if (id == nullptr) throw refuse("added token \"{}\" has no id", printable(content));
        for (const char* name : {"single_word", "lstrip", "rstrip"})
          if (flag(token, name)) throw refuse("added token \"{}\" has {} (not supported)", printable(content), name);
        const Bpe::Added entry{static_cast<std::uint32_t>(id_of(*id, content)), content, flag(token, "special", true),
                               flag(token, "normalized")};
        if (!contents.emplace(content, entry).second)
          throw refuse("added token \"{}\" exists twice", printable(content));
      }
    }
    const std::size_t most = vocabulary.size() + contents.size();
    const auto require_dense = [&](std::size_t id, const std::string& token) {
      if (id >= most)
        throw refuse("the id of \"{}\" is {} (of {} tokens; ids have no gaps)", printable(token), id, most);
    };
    for (const auto& [token, value] : vocabulary.items()) {
      const std::size_t id = id_of(value, token);
      const auto also_added = contents.find(token);
      if (also_added != contents.end()) {
        if (also_added->second.id != id)
          throw refuse("added token \"{}\" has the id {}, in the vocabulary {} (one of them counts)", printable(token),
                       also_added->second.id, id);
        in_vocabulary_.emplace(token, static_cast<std::uint32_t>(id));
        continue;
      }
      require_dense(id, token);
      place(id);
      if (!model_.tokens[id].empty()) throw refuse("id {} has two tokens", id);
      if (token.empty() || !from_alphabet(token, model_.tokens[id]))
        throw refuse("token \"{}\" is not in the alphabet of bytes (only byte-level BPE is supported)",
                     printable(token));
      ids_.emplace(token, static_cast<std::uint32_t>(id));
    }
    for (const auto& [content, token] : contents) {
      require_dense(token.id, content);
      place(token.id);
      model_.added.push_back(token);
    }
    // Added tokens of single bytes are tokens of the text too; merges() finds other ones.
    for (int byte = 0; byte < 256; ++byte) as_token(to_alphabet(std::string(1, static_cast<char>(byte))));
    std::sort(model_.added.begin(), model_.added.end(),
              [](const Bpe::Added& a, const Bpe::Added& b) { return a.id < b.id; });
  }

  /// Makes an added token that the vocabulary has a token of merges too.
  void as_token(const std::string& token) {
    const auto found = in_vocabulary_.find(token);
    if (found == in_vocabulary_.end() || !ids_.emplace(token, found->second).second) return;
    if (!from_alphabet(token, model_.tokens[found->second]))
      throw refuse("added token \"{}\" belongs to a merge and is not in the alphabet of bytes", printable(token));
    if (model_.tokens[found->second] != token)
      throw refuse("added token \"{}\" stands for other bytes in the vocabulary (not supported)", printable(token));
  }

  void merges(const json& merges) {
    for (const json& merge : merges) {
      std::string left, right;
      if (merge.is_string()) {  // "a b", older files
        const std::string both = merge.get<std::string>();
        const std::size_t space = both.find(' ');
        left = both.substr(0, space);
        right = space == both.npos ? "" : both.substr(space + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0];
        right = merge[1];
      }
      for (const std::string& token : {left, right, left + right}) as_token(token);
      const auto a = ids_.find(left), b = ids_.find(right);
      if (a == ids_.end() || b == ids_.end())
        throw refuse("merge {} joins \"{}\" and \"{}\", which are not both in the vocabulary", model_.merges.size(),
                     printable(left), printable(right));
      model_.merges.emplace_back(a->second, b->second);
    }
  }

  const json& file_;
  std::string_view source_;
  Bpe model_;
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::unordered_map<std::string, std::uint32_t> in_vocabulary_;  ///< added tokens that the vocabulary has
};

}  // namespace

Bpe bpe_of_huggingface(const json& file, std::string_view source) { return Import(file, source).result(); }

SpecialTokens special_tokens_of_huggingface(const json& file, std::string_view source) {
  return Import(file, source).special_tokens();
}

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
json template_of(const SpecialTokens& special, const Bpe& model) {
  if (special.begin.empty() && special.end.empty()) return nullptr;
  json names = json::object();
  const auto pieces = [&](const char* sequence, int type) {
    json list = json::array();
    const auto add = [&](const std::vector<std::uint32_t>& ids) {
      for (const std::uint32_t id : ids) {
        std::string name = to_alphabet(id < model.tokens.size() ? model.tokens[id] : "");
        for (const Bpe::Added& added : model.added)
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

json huggingface_of_bpe(const Bpe& model, const SpecialTokens& special) {
  json vocabulary = json::object(), merges = json::array(), added = json::array(), splits = json::array();
  for (std::size_t id = 0; id < model.tokens.size(); ++id)
    if (!model.tokens[id].empty()) vocabulary[to_alphabet(model.tokens[id])] = id;
  for (const auto& [left, right] : model.merges)
    merges.push_back(to_alphabet(model.tokens[left]) + " " + to_alphabet(model.tokens[right]));
  for (const Bpe::Added& token : model.added) {
    vocabulary[token.content] = token.id;  // that the library gives it this id
    added.push_back(added_token(token.id, token.content, token.special, token.normalized));
  }
  for (const SplitRule& rule : model.splits) splits.push_back(split_of(rule));
  splits.push_back(byte_level(false));
  return file_of(added, {{"type", "Sequence"}, {"pretokenizers", splits}}, template_of(special, model),
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

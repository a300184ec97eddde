// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/huggingface.hpp"

#include <unordered_map>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;

constexpr std::size_t kMostTokens = std::size_t{1} << 22;

class Import {
 public:
  Import(const json& file, std::string_view source) : file_(file), source_(source) {}

  Bpe result() {
    if (const json* normalizer = member(file_, "normalizer")) throw unsupported("normaliser", *normalizer);
    model_.pattern = pattern();
    const json& model = object(file_, "model");
    if (const std::string type = text(model, "type"); type != "BPE" && !type.empty())
      throw refuse("has a model of type {} (only BPE is supported)", printable(type));
    if (const json* dropout = member(model, "dropout"); dropout != nullptr && *dropout != 0)
      throw refuse("has BPE dropout (not supported)");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!text(model, name).empty()) throw refuse("has a {} (not supported)", name);
    if (flag(model, "byte_fallback")) throw refuse("has byte_fallback (only byte-level BPE is supported)");
    model_.ignore_merges = flag(model, "ignore_merges");
    vocabulary(object(model, "vocab"));
    merges(list(model, "merges"));
    return std::move(model_);
  }

 private:
  template <class... Args>
  Error refuse(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::data, "{}: {}", source_, fmt::format(format, std::forward<Args>(args)...));
  }
  Error unsupported(const char* what, const json& part) const {
    return refuse("has the {} \"{}\" (not supported)", what, printable(text(part, "type")));
  }

  /// Null if there is none, or the value null.
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

  /// The splitting pattern: ByteLevel alone splits as GPT-2, or a Split by a regular expression comes before it.
  std::string pattern() const {
    const json* pre = member(file_, "pre_tokenizer");
    if (pre == nullptr) throw refuse("has no pre-tokeniser (only byte-level BPE is supported)");
    std::vector<const json*> steps{pre};
    if (text(*pre, "type") == "Sequence") {
      steps.clear();
      for (const json& step : list(*pre, "pretokenizers")) steps.push_back(&step);
    }
    std::string found;
    bool byte_level = false;
    for (const json* step : steps) {
      const std::string type = text(*step, "type");
      if (type == "Split" && !byte_level && found.empty()) {
        const json* expression = member(*step, "pattern");
        if (expression != nullptr) found = text(*expression, "Regex");
        if (found.empty() || text(*step, "behavior") != "Isolated" || flag(*step, "invert"))
          throw refuse("has a Split that is not {{\"Regex\"}} with behavior Isolated (not supported)");
        found = pattern_name(found);
      } else if (type == "ByteLevel" && !byte_level) {
        byte_level = true;
        if (flag(*step, "add_prefix_space", true)) throw refuse("has add_prefix_space (not supported)");
        if (flag(*step, "use_regex", true)) {
          if (!found.empty()) throw refuse("splits twice (Split, and ByteLevel with use_regex: not supported)");
          found = "gpt2";
        }
      } else {
        throw unsupported("pre-tokeniser", *step);
      }
    }
    if (!byte_level || found.empty())
      throw refuse("has no byte-level pre-tokeniser (only byte-level BPE is supported)");
    return found;
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
    std::unordered_map<std::string, std::size_t> contents;
    if (added != nullptr) {
      if (!added->is_array()) throw refuse("\"added_tokens\" is not a list");
      for (const json& token : *added) {
        const std::string content = text(token, "content");
        const json* id = member(token, "id");
        if (id == nullptr) throw refuse("added token \"{}\" has no id", printable(content));
        for (const char* name : {"single_word", "lstrip", "rstrip"})
          if (flag(token, name)) throw refuse("added token \"{}\" has {} (not supported)", printable(content), name);
        if (!contents.emplace(content, id_of(*id, content)).second)
          throw refuse("added token \"{}\" exists twice", printable(content));
      }
    }
    const std::size_t most = vocabulary.size() + contents.size();
    const auto require_dense = [&](std::size_t id, const std::string& token) {
      if (id >= most)
        throw refuse("the id of \"{}\" is {} (of {} tokens; ids have no gaps)", printable(token), id, most);
    };
    for (const auto& [token, value] : vocabulary.items()) {
      if (contents.contains(token)) continue;
      const std::size_t id = id_of(value, token);
      require_dense(id, token);
      place(id);
      if (!model_.tokens[id].empty()) throw refuse("id {} has two tokens", id);
      if (token.empty() || !from_alphabet(token, model_.tokens[id]))
        throw refuse("token \"{}\" is not in the alphabet of bytes (only byte-level BPE is supported)",
                     printable(token));
      ids_.emplace(token, static_cast<std::uint32_t>(id));
    }
    for (const auto& [content, id] : contents) {
      require_dense(id, content);
      place(id);
      model_.added.push_back({static_cast<std::uint32_t>(id), content});
    }
    std::sort(model_.added.begin(), model_.added.end(),
              [](const Bpe::Added& a, const Bpe::Added& b) { return a.id < b.id; });
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
};

}  // namespace

Bpe bpe_of_huggingface(const json& file, std::string_view source) { return Import(file, source).result(); }

json huggingface_of_bpe(const Bpe& model) {
  json vocabulary = json::object(), merges = json::array(), added = json::array();
  for (std::size_t id = 0; id < model.tokens.size(); ++id)
    if (!model.tokens[id].empty()) vocabulary[to_alphabet(model.tokens[id])] = id;
  for (const auto& [left, right] : model.merges)
    merges.push_back(to_alphabet(model.tokens[left]) + " " + to_alphabet(model.tokens[right]));
  for (const Bpe::Added& token : model.added) {
    vocabulary[token.content] = token.id;  // that the library gives it this id
    added.push_back({{"id", token.id},
                     {"content", token.content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const json decoder = byte_level;
  json split = {{"type", "Split"},
                {"pattern", {{"Regex", published_pattern(model.pattern)}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}},
          {"post_processor", nullptr},
          {"decoder", decoder},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", model.ignore_merges},
            {"vocab", vocabulary},
            {"merges", merges}}}};
}

}  // namespace weft::language_model

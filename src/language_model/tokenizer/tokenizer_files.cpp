// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/tokenizer_files.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "storage/durable.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;

constexpr const char *kConfig = "config.json", *kGeneration = "generation_config.json",
                     *kTokenizerConfig = "tokenizer_config.json";
/// Files that are copied unchanged.
constexpr const char* kKept[] = {kTokenizerConfig, "special_tokens_map.json", "chat_template.jinja",
                                 "chat_template.json", kGeneration};
constexpr std::int64_t kLargestFile = std::int64_t{16} << 20;
constexpr std::size_t kMostEnds = 1024;

std::string contents_of(const fs::path& path) {
  return fs::exists(path) ? storage::read_text(open_regular(path, ExitCode::data), path, kLargestFile) : "";
}

SortedJson object_in(const std::string& text, const fs::path& path) {
  if (text.empty()) return SortedJson::object();
  SortedJson object = parse_json<SortedJson>(text);
  if (!object.is_object()) throw error(ExitCode::data, "{}: is not a JSON object; is it complete?", path.string());
  return object;
}

/// Adds the symbols that end a text: an id, a list of ids, null, or no value.
void add_ends(const SortedJson& file, const fs::path& path, std::vector<std::uint32_t>& ends) {
  const auto found = file.find("eos_token_id");
  if (found == file.end() || found->is_null()) return;
  const SortedJson list = found->is_array() ? *found : SortedJson::array({*found});
  for (const SortedJson& id : list) {
    if (!id.is_number_unsigned() || id >= std::uint64_t{UINT32_MAX} || ends.size() == kMostEnds)
      throw error(ExitCode::data, "{}: \"eos_token_id\" is {}, not an id or a list of ids; correct it", path.string(),
                  printable(found->dump()));
    if (const std::uint32_t end = id; std::find(ends.begin(), ends.end(), end) == ends.end()) ends.push_back(end);
  }
}

/// Name of a token, stored as "<s>" or {"content": "<s>", …}; "" if there is none.
std::string token_in(const SortedJson& file, const char* name) {
  const auto found = file.find(name);
  if (found == file.end()) return "";
  if (found->is_string()) return *found;
  const bool named = found->is_object() && found->contains("content") && (*found)["content"].is_string();
  return named ? (*found)["content"].get<std::string>() : "";
}

/// add_bos_token and add_eos_token, if one is there, replace what the post-processor of the tokenizer.json adds, as in
/// transformers 5.
void apply_added_flags(const Tokenizer& tokenizer, const SortedJson& file, const fs::path& path,
                       SpecialTokens& special) {
  bool present = false;
  const auto ids = [&](const char* flag, const char* token) -> std::vector<std::uint32_t> {
    const auto found = file.find(flag);
    if (found == file.end() || found->is_null()) return {};
    if (!found->is_boolean())
      throw error(ExitCode::data, "{}: \"{}\" is {}, neither true nor false; correct it", path.string(), flag,
                  printable(found->dump()));
    present = true;
    const std::string name = token_in(file, token);
    if (!found->get<bool>() || name.empty()) return {};
    const std::int64_t id = tokenizer.special(name);
    if (id < 0)
      throw error(ExitCode::data, "{}: \"{}\" adds \"{}\", which is no added token of the tokeniser; correct it",
                  path.string(), flag, printable(name));
    return {static_cast<std::uint32_t>(id)};
  };
  std::vector<std::uint32_t> begin = ids("add_bos_token", "bos_token"), end = ids("add_eos_token", "eos_token");
  if (!present) return;
  special.begin = std::move(begin);
  special.end = std::move(end);
}

/// The name of an id that is a special symbol; "" for others.
std::string name_of(const Tokenizer& tokenizer, std::uint32_t id) {
  const std::string name = id < tokenizer.vocabulary_size() ? tokenizer.detokenise({&id, 1}) : "";
  return !name.empty() && tokenizer.special(name) == id ? name : "";
}

/// True for kinds that are not recognised in a tokenizer.json.
bool is_own_kind(const Tokenizer& tokenizer) { return tokenizer.kind() == "character" || tokenizer.kind() == "bytes"; }

/// The file for a tokeniser without one: a tokeniser that Weft trained, or a directory that had none.
std::string tokenizer_config(const Tokenizer& tokenizer) {
  const SpecialTokens& special = tokenizer.special_tokens();
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  if (is_own_kind(tokenizer)) {
    for (const auto& [name, key] :
         {std::pair{"BOS", "bos_token"}, {"EOS", "eos_token"}, {"PAD", "pad_token"}, {"UNK", "unk_token"}})
      if (tokenizer.special(name) >= 0) config[key] = exported_symbol(name);
    return json_text(config, 2) + "\n";
  }
  std::string end, begin;
  if (const std::int64_t id = end_of_text(tokenizer); id >= 0)
    end = name_of(tokenizer, static_cast<std::uint32_t>(id));
  else if (!special.ends.empty())
    end = name_of(tokenizer, special.ends[0]);
  if (!special.begin.empty())
    begin = name_of(tokenizer, special.begin[0]);
  else if (end == kEndOfText)
    begin = end;
  if (!begin.empty()) config["bos_token"] = begin;
  if (!end.empty()) config["eos_token"] = end;
  return json_text(config, 2) + "\n";
}

}  // namespace

Tokenizer with_files_of(const Tokenizer& tokenizer, const fs::path& directory) {
  SpecialTokens special = tokenizer.special_tokens();
  std::vector<std::uint32_t> ends;
  for (const char* name : {kGeneration, kConfig})
    add_ends(object_in(contents_of(directory / name), directory / name), directory / name, ends);
  for (const char* name : kKept)
    if (std::string text = contents_of(directory / name); !text.empty()) special.files[name] = std::move(text);
  const SortedJson config = object_in(contents_of(directory / kTokenizerConfig), directory / kTokenizerConfig);
  apply_added_flags(tokenizer, config, directory / kTokenizerConfig, special);
  if (const std::int64_t id = tokenizer.special(token_in(config, "eos_token")); ends.empty() && id >= 0)
    ends.push_back(static_cast<std::uint32_t>(id));
  if (!ends.empty()) special.ends = ends;
  return tokenizer.with(std::move(special));
}

void write_tokenizer_files(const Tokenizer& tokenizer, const fs::path& directory) {
  const SpecialTokens& special = tokenizer.special_tokens();
  storage::write_text(directory / kHuggingFaceTokenizer, tokenizer.huggingface_text());
  if (is_own_kind(tokenizer)) storage::write_text(directory / kWeftTokenizer, tokenizer.text());
  for (const auto& [name, contents] : special.files) storage::write_text(directory / name, contents);
  if (!special.files.contains(kTokenizerConfig))
    storage::write_text(directory / kTokenizerConfig, tokenizer_config(tokenizer));
  // The config.json that Weft writes has one end at most: this file has the others.
  const auto kept = special.files.find(kGeneration);
  Json generation = kept == special.files.end() ? Json::object() : parse_json(kept->second);
  if (special.ends.empty() || !generation.is_object() ||
      (generation.contains("eos_token_id") && !generation["eos_token_id"].is_null()))
    return;
  generation["eos_token_id"] = special.ends;
  storage::write_text(directory / kGeneration, json_text(generation, 2) + "\n");
}

std::string stored_eos_token(const Tokenizer& tokenizer) {
  const auto& files = tokenizer.special_tokens().files;
  const auto config = files.find(kTokenizerConfig);
  return config == files.end() ? "" : token_in(object_in(config->second, kTokenizerConfig), "eos_token");
}

std::filesystem::path tokenizer_file(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return path;
  return path / (std::filesystem::exists(path / kWeftTokenizer) ? kWeftTokenizer : kHuggingFaceTokenizer);
}

}  // namespace weft::language_model

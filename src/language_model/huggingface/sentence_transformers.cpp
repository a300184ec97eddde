// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/sentence_transformers.hpp"

#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/format.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "interchange/foreign_settings.hpp"
#include "storage/durable.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;
using interchange::ForeignSettings;

constexpr std::int64_t kLargestModules = std::int64_t{1} << 20, kLongestText = std::int64_t{1} << 28;

[[noreturn]] void refuse_embedding(const fs::path& file, std::string_view why) {
  throw error(ExitCode::usage,
              "{}: {} (the embedding of a text is the mean over its tokens); to measure with this mean all the same, "
              "name a copy of the directory without modules.json",
              file.string(), why);
}

/// The key of a mode in files before version 6, which have a flag for each.
constexpr const char* kMeanFlag = "pooling_mode_mean_tokens";
constexpr const char* kOtherModeFlags[] = {"pooling_mode_cls_token", "pooling_mode_max_tokens",
                                           "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens",
                                           "pooling_mode_lasttoken"};

void require_mean_mode(const fs::path& file) {
  ForeignSettings config(file);
  // Whether the tokens of a prompt count: here they are context.
  constexpr const char* kUnused[] = {"embedding_dimension", "word_embedding_dimension", "include_prompt", kMeanFlag};
  config.without_effect(kUnused);
  const SortedJson& mode = config.value("pooling_mode");
  const auto names_mean = [](const SortedJson& value) {
    return value.is_string() && value.get_ref<const std::string&>() == "mean";
  };
  const bool is_mean = names_mean(mode) || (mode.is_array() && mode.size() == 1 && names_mean(mode.front()));
  if (!mode.is_null() && !is_mean)
    refuse_embedding(file, fmt::format("pooling_mode is {}", printable(json_text(mode))));
  for (const char* const flag : kOtherModeFlags)
    if (config.flag(flag) && mode.is_null()) refuse_embedding(file, fmt::format("{} is true", flag));
  config.finish();
}

/// Throws if the module works on something other than the embedding, whose length does not change a cosine.
void require_plain_normalisation(const fs::path& file) {
  if (!fs::exists(file)) return;  // before version 6
  ForeignSettings config(file);
  for (const char* const key : {"module_input_name", "module_output_name"})
    if (const std::string name = config.text(key, "sentence_embedding"); name != "sentence_embedding")
      refuse_embedding(file, fmt::format("{} is \"{}\"", key, printable(name)));
  config.finish();
}

void require_modules(const fs::path& directory) {
  const fs::path file = directory / "modules.json";
  const SortedJson modules =
      parse_json<SortedJson>(storage::read_text(open_regular(file, ExitCode::data), file, kLargestModules));
  bool pooled = false;
  if (modules.is_array())
    for (const SortedJson& module : modules) {
      if (!module.is_object() || !module.contains("type") || !module["type"].is_string() || !module.contains("path") ||
          !module["path"].is_string())
        throw error(ExitCode::data, "{}: has a module without \"type\" and \"path\"; is it complete?", file.string());
      std::string type = module["type"].get<std::string>();
      const fs::path part = module["path"].get<std::string>();
      if (part.has_parent_path() || part == ".." || part.is_absolute())
        throw error(ExitCode::data, "{}: \"{}\" is no directory next to it; correct it", file.string(),
                    printable(part.string()));
      type.erase(0, type.rfind('.') + 1);
      const fs::path config = directory / part / "config.json";
      if (type == "Pooling" && !pooled)
        require_mean_mode(config);
      else if (type == "Normalize" && pooled)
        require_plain_normalisation(config);
      else if (type != "Transformer" || pooled || !part.empty())
        refuse_embedding(file,
                         fmt::format("has the module \"{}\" in \"{}\"", printable(type), printable(part.string())));
      pooled |= type == "Pooling";
    }
  if (!pooled) refuse_embedding(file, "has no module \"Pooling\"");
}

/// A prompt that is put before every text.
void require_no_prompt(const fs::path& file) {
  if (!fs::exists(file)) return;
  ForeignSettings config(file);
  if (const std::string type = config.text("model_type", "SentenceTransformer"); type != "SentenceTransformer")
    refuse_embedding(file, fmt::format("model_type is \"{}\"", printable(type)));
  const std::string name = config.text("default_prompt_name");
  const SortedJson& prompts = config.value("prompts");
  const auto prompt = prompts.is_object() ? prompts.find(name) : prompts.end();
  if (!name.empty() && (prompt == prompts.end() || *prompt != ""))
    refuse_embedding(file, fmt::format("default_prompt_name is \"{}\"", printable(name)));
  // The others are chosen by the caller; so is the measure of similarity, which is a cosine here.
  constexpr const char* kUnused[] = {"__version__", "similarity_fn_name"};
  config.without_effect(kUnused);
  config.finish();
}

std::optional<std::int64_t> limit_of(ForeignSettings& config, const char* key) {
  const SortedJson& value = config.value(key);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(kLongestText))
    return std::nullopt;  // absent, or a number that stands for no limit
  return value.get<std::int64_t>();
}

std::optional<std::int64_t> longest_text_of(const fs::path& directory) {
  std::optional<std::int64_t> longest;
  if (const fs::path file = directory / "sentence_bert_config.json"; fs::exists(file)) {
    ForeignSettings config(file);
    longest = limit_of(config, "max_seq_length");
    if (config.flag("do_lower_case")) refuse_embedding(file, "do_lower_case is true");
    for (const auto& [key, usual] :
         {std::pair("transformer_task", "feature-extraction"), {"module_output_name", "token_embeddings"}})
      if (const std::string found = config.text(key, usual); found != usual)
        refuse_embedding(file, fmt::format("{} is \"{}\"", key, printable(found)));
    const SortedJson forward = {{"text", {{"method", "forward"}, {"method_output_name", "last_hidden_state"}}}};
    if (const SortedJson& modality = config.value("modality_config"); !modality.is_null() && modality != forward)
      refuse_embedding(file, fmt::format("modality_config is {}", printable(json_text(modality))));
    config.finish();
  }
  if (const fs::path file = directory / "tokenizer_config.json"; !longest && fs::exists(file)) {
    ForeignSettings config(file);
    longest = limit_of(config, "model_max_length");
  }
  return longest;
}

}  // namespace

std::optional<std::int64_t> require_mean_pooling(const fs::path& directory) {
  if (!fs::exists(directory / "modules.json")) return std::nullopt;
  require_modules(directory);
  require_no_prompt(directory / "config_sentence_transformers.json");
  return longest_text_of(directory);
}

std::optional<std::int64_t> require_mean_embedding(const fs::path& directory, const Tokenizer& tokenizer) {
  const std::optional<std::int64_t> longest = require_mean_pooling(directory);
  const SpecialTokens& added = tokenizer.special_tokens();
  if (fs::exists(directory / "modules.json") && (!added.begin.empty() || !added.end.empty()))
    refuse_embedding(directory / "tokenizer.json",
                     "its post-processor adds tokens, which sentence-transformers takes for those of the text");
  return longest;
}

}  // namespace weft::language_model

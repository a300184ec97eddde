// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/peft_config.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "storage/durable.hpp"

namespace weft::language_model {
namespace {

constexpr std::int64_t kLargestAdapterConfig = std::int64_t{1} << 20;

/// Keys that are read.
constexpr const char* kRead[] = {
    "peft_type",     "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "rank_pattern", "alpha_pattern",
    "target_modules"};
/// Keys that do not change what the adapters of a file compute: names, training, how first values were drawn, and which
/// layers have adapters, which the tensors say.
constexpr const char* kHarmlessAdapterKeys[] = {"auto_mapping",        "base_model_name_or_path",
                                                "ensure_weight_tying", "eva_config",
                                                "exclude_modules",     "fan_in_fan_out",
                                                "inference_mode",      "layers_pattern",
                                                "layers_to_transform", "lora_dropout",
                                                "megatron_core",       "peft_version",
                                                "qalora_group_size",   "revision",
                                                "runtime_config",      "task_type"};
/// Values of init_lora_weights after which the base model is as it was.
constexpr const char* kPlainInitial[] = {"gaussian", "orthogonal", "eva"};

/// True for values that turn a key off: null, false, 0, "", [] and {}.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == 0 || value == "" ||
         ((value.is_array() || value.is_object()) && value.empty());
}

/// The regular expressions of PEFT's patterns are those of Python's module re, of which PCRE2 has the syntax.
class Pattern {
 public:
  /// Matches like PEFT: the end of the name, from a dot on, or the whole name.
  Pattern(const std::string& key, const std::string& where) : where_(where) {
    const std::string expression = "(.*\\.)?(" + key + ")$";
    int problem = 0;
    PCRE2_SIZE at = 0;
    if (key.size() <= kLongest)
      code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                                PCRE2_UTF | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C, &problem, &at, nullptr));
    if (code_ == nullptr) fail(problem);
    match_.reset(pcre2_match_data_create(1, nullptr));
    context_.reset(pcre2_match_context_create(nullptr));
    if (match_ == nullptr || context_ == nullptr) throw std::bad_alloc();
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), kHeapLimit);
  }
  bool matches(std::string_view name) const {
    const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, 0,
                                   match_.get(), context_.get());
    if (result < 0 && result != PCRE2_ERROR_NOMATCH) fail(result);
    return result >= 0;
  }

 private:
  // Bounds of one match: backtracking steps, and memory in KiB.
  static constexpr std::uint32_t kMatchLimit = 100'000, kHeapLimit = 16 * 1024;
  static constexpr std::size_t kLongest = 4096;

  [[noreturn]] void fail(int code) const {
    PCRE2_UCHAR text[256] = "too long";
    if (code != 0) pcre2_get_error_message(code, text, sizeof text);
    throw error(ExitCode::usage, "{}, which is no regular expression that Weft reads ({}); write the names of modules",
                where_, reinterpret_cast<const char*>(text));
  }
  template <auto release>
  struct Release {
    template <class T>
    void operator()(T* object) const {
      release(object);
    }
  };

  const std::string where_;
  std::unique_ptr<pcre2_code, Release<pcre2_code_free>> code_;
  std::unique_ptr<pcre2_match_data, Release<pcre2_match_data_free>> match_;
  std::unique_ptr<pcre2_match_context, Release<pcre2_match_context_free>> context_;
};

}  // namespace

PeftConfig::PeftConfig(const std::filesystem::path& file) : path_(file.string()) {
  const Descriptor opened = open_regular(file, ExitCode::data);
  config_ = parse_json(storage::read_text(opened, file, kLargestAdapterConfig));
  if (!config_.is_object()) throw error(ExitCode::data, "{}: is no JSON object; is it complete?", path_);
  check_keys();
  check_initial();
  rank_stabilised_ = config_.value("use_rslora", Json()) == true;
  for (const char* key : {"layers_to_transform", "exclude_modules"})
    if (const auto found = config_.find(key);
        found != config_.end() && (found->is_number() || !is_off(*found)) && exclusion_.empty())
      exclusion_ = fmt::format("{} = {}", key, printable(json_text(*found)));
  if (const auto names = config_.find("target_modules"); names != config_.end() && names->is_array())
    for (const Json& name : *names)
      if (name.is_string()) targets_.push_back(name.get<std::string>());
}

void PeftConfig::check_keys() const {
  const auto refuse = [&](const std::string& why) { throw error(ExitCode::usage, "{}: {}", path_, why); };
  if (const auto type = config_.find("peft_type"); type == config_.end() || *type != "LORA")
    refuse("peft_type is not \"LORA\" (no other kind of adapter is read); name another directory");
  if (const auto bias = config_.find("bias"); bias != config_.end() && !is_off(*bias) && *bias != "none")
    refuse(
        fmt::format("bias is {} (biases stay as they are here); name another directory", printable(json_text(*bias))));
  if (const auto kind = config_.find("use_rslora"); kind != config_.end() && !is_off(*kind) && *kind != true)
    throw error(ExitCode::data, "{}: \"use_rslora\" is neither true nor false", path_);
  for (const char* pattern : {"rank_pattern", "alpha_pattern"})
    if (const auto found = config_.find(pattern); found != config_.end() && !is_off(*found) && !found->is_object())
      throw error(ExitCode::data, "{}: \"{}\" is not an object", path_, pattern);
  const auto in = [](std::span<const char* const> keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  for (const auto& [key, value] : config_.items())
    if (!in(kRead, key) && !in(kHarmlessAdapterKeys, key) && !is_off(value))
      refuse(fmt::format("{} is {} (which Weft does not have); merge the adapters with PEFT, or name another directory",
                         printable(key), printable(json_text(value), 100)));
}

void PeftConfig::check_initial() const {
  const auto found = config_.find("init_lora_weights");
  if (found == config_.end() || found->is_boolean() || found->is_null()) return;
  const std::string value = found->is_string() ? found->get<std::string>() : "";
  if (std::find(std::begin(kPlainInitial), std::end(kPlainInitial), value) != std::end(kPlainInitial)) return;
  throw error(
      ExitCode::usage,
      "{}: init_lora_weights is {} (with which PEFT changes the weights of the base model when it loads the "
      "adapters; here they stay as they are); save them with path_initial_model_for_weight_conversion, or merge "
      "them with PEFT",
      path_, printable(json_text(*found)));
}

/// The value of the first pattern that matches the layer, or else that of the whole file.
double PeftConfig::number_for(std::string_view layer, const char* pattern, const char* key) const {
  const auto number = [&](const Json* value, std::string_view name) {
    if (value == nullptr || !value->is_number() || !(value->get<double>() > 0))
      throw error(ExitCode::data, "{}: has no number above 0 as \"{}\"; is it complete?", path_, printable(name));
    return value->get<double>();
  };
  if (const auto patterns = config_.find(pattern); patterns != config_.end() && patterns->is_object())
    for (const auto& [expression, value] : patterns->items())
      if (Pattern(expression, fmt::format("{}: {} has \"{}\"", path_, pattern, printable(expression))).matches(layer))
        return number(&value, expression);
  const auto found = config_.find(key);
  return number(found == config_.end() ? nullptr : &*found, key);
}

double PeftConfig::scale(std::string_view layer) const {
  const double rank = this->rank(layer);
  return number_for(layer, "alpha_pattern", "lora_alpha") / (rank_stabilised_ ? std::sqrt(rank) : rank);
}

bool PeftConfig::requires_adapter(std::string_view layer) const {
  return exclusion_.empty() && std::any_of(targets_.begin(), targets_.end(), [&](const std::string& target) {
           return layer == target || layer.ends_with("." + target);
         });
}

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "interchange/hooks.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::interchange {
namespace {

constexpr std::string_view kBlocks = "blocks.", kBlock = "blocks.{}.";

struct Point {
  std::string_view stored;  ///< end of the name in a dataset
  std::string_view name;
  std::string_view same;  ///< another name of the same values; for mlp.hook_out only if no norm follows the MLP
};

// Checked against circuit-tracer 0.5 (ReplacementMLP, tl_nnsight_mapping.py) and TransformerLens 3.2 (MLPBridge). The
// input of the MLP is the output of the norm with its weight: HookedTransformer's ln2.hook_normalized is before the
// weight, and its hook_mlp_in is before the norm.
constexpr Point kPoints[] = {{"{}.mlp.input", "mlp.hook_in", "ln2.hook_out"},
                             {"{}.mlp.output", "mlp.hook_out", "hook_mlp_out"},
                             {"{}.ln_2.input", "hook_resid_mid", ""},
                             {"{}.pre_feedforward_layernorm.input", "hook_resid_mid", ""},
                             {"{}.post_feedforward_layernorm.output", "hook_mlp_out", ""}};

const Point* point_of(std::string_view hook) {
  for (const Point& point : kPoints)
    if (hook.ends_with(point.stored)) return &point;
  return nullptr;
}

bool is_number(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char character) { return '0' <= character && character <= '9'; });
}

/// Returns the layer in "blocks.{}.mlp.hook_in" or "blocks.3.mlp.hook_in": "{}", "3"; "" for a name inside a block.
std::string_view layer_of(std::string_view hook) {
  if (!hook.starts_with(kBlocks)) return {};
  const std::string_view rest = hook.substr(kBlocks.size()), layer = rest.substr(0, rest.find('.'));
  return layer.size() < rest.size() && (layer == "{}" || is_number(layer)) ? layer : std::string_view();
}

/// True for the path of a module in a model of another library, which has its layer in it: "transformer.h.{}.mlp".
bool is_module_path(std::string_view name) {
  if (is_transformer_lens(name) || name.starts_with(kBlocks)) return false;
  if (name.find("{}") != name.npos) return true;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    if (is_number(name.substr(at, end - at))) return true;
    at = end + 1;
  }
  return false;
}

}  // namespace

bool is_transformer_lens(std::string_view hook) {
  const std::size_t last = hook.rfind('.');
  return hook.substr(last == hook.npos ? 0 : last + 1).starts_with("hook_");
}

std::string inside_block(const std::string& hook) {
  const std::string_view layer = layer_of(hook);
  return is_transformer_lens(hook) && !layer.empty() ? hook.substr(kBlocks.size() + layer.size() + 1) : hook;
}

std::string with_block(const std::string& hook) {
  return is_transformer_lens(hook) && layer_of(hook).empty() && hook.find("{}") == hook.npos
             ? std::string(kBlock) + hook
             : hook;
}

std::string transformer_lens_name(std::string_view hook) {
  if (is_transformer_lens(hook)) return inside_block(std::string(hook));
  const Point* const point = point_of(hook);
  return point == nullptr ? "" : std::string(point->name);
}

void require_same_point(std::string_view option, const std::string& given, const std::string& stored,
                        const std::string& data, std::int64_t n_layers) {
  if (const std::string_view layer = layer_of(given); n_layers > 1 && is_number(layer))
    throw error(ExitCode::usage, "{} {}: is of one layer (the transcoder has {}); give {{}} in place of {}", option,
                printable(given), n_layers, printable(layer));
  const std::string expected = transformer_lens_name(stored);
  if (given.empty() || expected.empty() || is_module_path(given)) return;
  const Point* const point = point_of(stored);
  const std::string inside = inside_block(given);
  if (inside == expected || (point != nullptr && inside == point->same)) return;
  throw error(ExitCode::usage,
              "{} {}: is not the point of the activations of {}, which were taken at {} (of TransformerLens {}; at "
              "another point the features are wrong); give {} or leave the option out",
              option, printable(given), data, printable(stored), expected, expected);
}

}  // namespace weft::interchange

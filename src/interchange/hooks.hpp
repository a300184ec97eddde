// SPDX-License-Identifier: Apache-2.0
//
// Hook points: the values of a model to which a transcoder applies. Datasets name them by module and side, {} for the
// layer: "block_{}.mlp.input" (weft lm harvest), "model.layers.{}.mlp.input" (weft harvest). TransformerLens, and
// the programs that build on it, have names of their own; a transcoder at a wrong point computes wrong
// features without an error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::interchange {

/// True for a name of TransformerLens: "hook_resid_mid", "mlp.hook_in", "blocks.{}.ln2.hook_normalized".
bool is_transformer_lens(std::string_view hook);

/// Returns the name in TransformerLens of a hook point of a dataset, inside its block: "mlp.hook_in"; "" if it is not
/// known for all models.
std::string transformer_lens_name(std::string_view hook);

/// Return a hook of TransformerLens without and with "blocks.{}."; any other hook unchanged. "blocks.3." is removed,
/// too, and kept where it is present.
std::string inside_block(const std::string& hook);
std::string with_block(const std::string& hook);

/// Throws Error(usage) if `given`, the value of `option`, is another point than `stored`, the hook point of `data`, or
/// the name of no hook of TransformerLens; a module path with the layer in it, such as "h.{}.mlp", is not compared.
/// "blocks.3." is valid for a transcoder of one layer and an error for several.
void require_same_point(std::string_view option, const std::string& given, const std::string& stored,
                        const std::string& data, std::int64_t n_layers);

}  // namespace weft::interchange

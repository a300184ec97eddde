// SPDX-License-Identifier: Apache-2.0
//
// Hook points: the values of a model to which a transcoder applies. Data sets name them by module and side, {} for the
// layer: "block_{}.mlp.input" (weft lm harvest), "model.layers.{}.mlp.input" (tools/harvest.py). TransformerLens, and
// the programs that build on it, have names of their own; a transcoder at another point than its own computes other
// features without a sign of it.
#pragma once

#include <string>
#include <string_view>

namespace weft::interchange {

/// True for a name of TransformerLens: "hook_resid_mid", "mlp.hook_in", "blocks.{}.ln2.hook_normalized".
bool is_transformer_lens(std::string_view hook);

/// The name of a hook point of a data set in TransformerLens, inside its block: "mlp.hook_in". "" if it is not known
/// for all models.
std::string transformer_lens_name(std::string_view hook);

/// A hook of TransformerLens without, and with, "blocks.{}."; any other hook as it is.
std::string inside_block(const std::string& hook);
std::string with_block(const std::string& hook);

/// Throws Error(usage) if `given`, the value of `option`, is a hook of TransformerLens at another point than `stored`,
/// the hook point of `data`.
void require_same_point(std::string_view option, const std::string& given, const std::string& stored,
                        const std::string& data);

}  // namespace weft::interchange

// SPDX-License-Identifier: Apache-2.0
//
// Conventions of other trainers, by the name of the project. A preset fills in keys that the input does not give; it
// has no other effect, and the resolved input names every value. The values are those of the formulas and defaults that
// a project publishes (docs/choosing.md compares them); a convention that Weft does not support is an error, not
// approximated.
#pragma once

#include <string>

#include "input/schema.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// Derives the defaults of all preset keys from transcoder.preset. Call after all keys have been added; `model` must
/// outlive the schema.
void add_preset(input::Schema&, const ModelSettings& model);

/// Describes what the project of the preset computes with these settings and Weft does not support: "problem (why)
/// suggestion", or "".
std::string missing_of_preset(const ModelSettings&);

}  // namespace weft::transcoder

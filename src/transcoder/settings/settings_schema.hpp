// SPDX-License-Identifier: Apache-2.0
//
// The schema of a transcoder's input, and its parts: settings_keys.cpp (table [transcoder]), settings_rules.cpp
// (conditions between keys), private_keys.cpp, presets.hpp.
#pragma once

#include "input/schema.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// Returns a schema of every key of the tables of a transcoder, bound to the members of `configuration`, which must
/// outlive the schema and hold its initial values, with the conditions between keys. Conditions that depend on the data
/// (layers, widths, the grid of ranks) are checked where those are known.
input::Schema schema(Configuration& configuration);

/// Adds conditions that hold for training but not for evaluation, export and the like, which accept imported
/// transcoders.
void add_training_rules(input::Schema&, const Configuration&);

/// Adds table [transcoder].
void add_model_keys(input::Schema&, ModelSettings&);

/// Adds conditions between keys of several tables, and between the keys of [transcoder].
void add_rules(input::Schema&, const Configuration&);

/// Adds the key privacy.record_rows and the conditions of a private run, bound to the configuration, which must outlive
/// the schema. Call after privacy::add_keys.
void add_private_keys(input::Schema&, Configuration&);

}  // namespace weft::transcoder

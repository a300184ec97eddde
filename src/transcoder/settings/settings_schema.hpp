// SPDX-License-Identifier: Apache-2.0
//
// The schema of a transcoder's input, and its parts: settings_keys.cpp (table [transcoder]), settings_rules.cpp
// (conditions between keys), private_keys.cpp, presets.hpp.
#pragma once

#include "input/schema.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::transcoder {

/// Every key of the tables of a transcoder, bound to the members of `configuration`, which must outlive the schema and
/// hold its initial values, with the conditions between keys. What depends on the data (layers, widths, the grid of
/// ranks) is checked where those are known.
input::Schema schema(Configuration& configuration);

/// Conditions of a training run that evaluation, export and the like do not have: those of imported transcoders.
void add_training_rules(input::Schema&);

/// Table [transcoder].
void add_model_keys(input::Schema&, ModelSettings&);

/// Conditions between keys of several tables, and between those of [transcoder].
void add_rules(input::Schema&, const Configuration&);

/// Key privacy.record_rows, and the conditions of a private run, bound to the configuration, which must outlive the
/// schema. After privacy::add_keys.
void add_private_keys(input::Schema&, Configuration&);

}  // namespace weft::transcoder

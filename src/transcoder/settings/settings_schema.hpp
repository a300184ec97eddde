// SPDX-License-Identifier: Apache-2.0
//
// The parts of `transcoder::schema` (settings.hpp).
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "input/schema.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::transcoder {

/// Adds table [transcoder].
void add_model_keys(input::Schema&, ModelSettings&);

/// Adds conditions between keys of several tables, and between the keys of [transcoder].
void add_rules(input::Schema&, const Configuration&);

/// Describes why batch_topk would keep no feature of a batch (k times its tokens and the layers of one budget rounds to
/// 0); "" if it keeps some.
std::string empty_budget(const Configuration&, std::int64_t layers_of_budget);

inline bool is_whole(double value) { return value == std::floor(value); }

}  // namespace weft::transcoder

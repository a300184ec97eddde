// SPDX-License-Identifier: Apache-2.0
//
// The list of parts. The memory plan, the construction and each step use it in the same order.
#pragma once

#include <memory>
#include <vector>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

/// Makes the parts that the input requests. Collective.
std::vector<std::unique_ptr<Part>> make_parts(PartContext);

/// Takes the memory of these parts from an arena that measures.
void measure_parts(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// The list of parts: memory plan and construction walk it in the same order, in which a step calls the parts.
#pragma once

#include <memory>
#include <vector>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

/// The parts that the input asks for. Collective.
std::vector<std::unique_ptr<Part>> make_parts(PartContext);

/// Takes what they take from an arena that measures.
void measure_parts(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);

}  // namespace weft::transcoder

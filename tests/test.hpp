// SPDX-License-Identifier: Apache-2.0
//
// What every test includes.
#pragma once

#include <doctest/doctest.h>

#include "device/runtime.hpp"
#include "parallel/world.hpp"

namespace weft::testing {

/// The ranks this test program runs on (one, unless it was registered with RANKS).
const parallel::World& world();
/// The arithmetic of this process.
const kernels::Execution& execution();

}  // namespace weft::testing

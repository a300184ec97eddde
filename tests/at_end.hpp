// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace weft::testing {

/// Calls `function` after the last case, while MPI and the GPU are still in use: for what several cases share. The last
/// function given is called first.
void at_end(std::function<void()> function);

}  // namespace weft::testing

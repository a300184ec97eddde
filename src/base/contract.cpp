// SPDX-License-Identifier: Apache-2.0
#include "base/contract.hpp"

#include <cstdio>
#include <cstdlib>

namespace weft {

void contract_broken(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: internal invariant violated: %s\n", file, line, condition);
  std::abort();
}

}  // namespace weft

// SPDX-License-Identifier: Apache-2.0
//
// Internal contracts, checked in debug builds only. What a user can get wrong is always checked, with an Error.
#pragma once

namespace weft {
/// Prints the broken contract and aborts: a program whose invariants do not hold has nothing safe left to do.
[[noreturn]] void contract_broken(const char* condition, const char* file, int line);
}  // namespace weft

#ifdef NDEBUG
#define WEFT_ASSERT(condition) static_cast<void>(0)
#else
#define WEFT_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::weft::contract_broken(#condition, __FILE__, __LINE__))
#endif

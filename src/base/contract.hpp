// SPDX-License-Identifier: Apache-2.0
//
// Assertions on internal invariants, checked in debug builds only. Mistakes of a user are always checked, with an
// Error.
#pragma once

namespace weft {
/// Prints the violated condition and aborts: the state of the program can no longer be trusted.
[[noreturn]] void contract_broken(const char* condition, const char* file, int line);
}  // namespace weft

#ifdef NDEBUG
#define WEFT_ASSERT(condition) static_cast<void>(0)
#else
#define WEFT_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::weft::contract_broken(#condition, __FILE__, __LINE__))
#endif

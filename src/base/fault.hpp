// SPDX-License-Identifier: Apache-2.0
//
// Faults on order, for tests: compiled in always, one branch per point when unused.
//
//   WEFT_FAULT=point[@n]:rank:step[:kind]
//
// fires once, the n-th time (default the first) that `rank` passes `point` at `step`; "*" stands for any rank or step.
// Kinds: kill (default, SIGKILL), exit, throw, segfault, stop (SIGSTOP), enospc (an error as if the disk were full),
// nan, and the requests usr1, usr2, term, int: that signal to the process itself, so that a request comes at a known
// step.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::fault {

enum class Kind { none, kill, exit, throw_error, segfault, stop, enospc, nan, usr1, usr2, term, interrupt };

namespace detail {
extern bool armed;
Kind fire(std::string_view name, int rank, std::int64_t step);
}  // namespace detail

/// Does what was ordered for this point. Returns `nan` where the caller itself must spoil its numbers, else `none`.
/// Throws Error(internal) for `throw`, Error(io) for `enospc`, Error(usage) when WEFT_FAULT cannot be read.
inline Kind point(std::string_view name, int rank, std::int64_t step) {
  return detail::armed ? detail::fire(name, rank, step) : Kind::none;
}

/// Orders a fault from within, in the same words; "" cancels. Not while other threads run.
void order(const std::string& words);

}  // namespace weft::fault

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
//
// Points, in the order of a step: data-wait; data-read (in the loader's thread; its step is the number of the batch
// since the start; nan spoils the batch); step; collective (every call of a communicator, whatever the thread). Of a
// checkpoint: after-open, mid-dataset, before-close, before-fsync, before-manifest, before-rename, after-rename,
// before-latest, mid-delete.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::fault {

enum class Kind { none, kill, exit, throw_error, segfault, stop, enospc, nan, usr1, usr2, term, interrupt };

namespace detail {
extern bool armed;
extern std::atomic<int> rank;
extern std::atomic<std::int64_t> step;
Kind fire(std::string_view name, int rank, std::int64_t step);
}  // namespace detail

/// Does what was ordered for this point. Returns `nan` where the caller itself must spoil its numbers, else `none`.
/// Throws Error(internal) for `throw`, Error(io) for `enospc`, Error(usage) when WEFT_FAULT cannot be read.
inline Kind point(std::string_view name, int rank, std::int64_t step) {
  return detail::armed ? detail::fire(name, rank, step) : Kind::none;
}

/// Where this process is: for points in rooms that know neither its rank in the world nor the step.
inline void note_rank(int rank) { detail::rank = rank; }
inline void note_step(std::int64_t step) { detail::step = step; }
inline Kind point(std::string_view name) {
  return detail::armed ? detail::fire(name, detail::rank, detail::step) : Kind::none;
}

/// Orders a fault from within, in the same words; "" cancels. Not while other threads run.
void order(const std::string& words);

}  // namespace weft::fault

// SPDX-License-Identifier: Apache-2.0
//
// Fault injection for tests. Always compiled in; costs one branch per point if no fault is requested.
//
//   WEFT_FAULT=point[@n]:rank:step[:kind]
//
// injects one fault, the n-th time (default: the first; "@*": each time) that `rank` passes `point` at `step`; "*"
// matches any rank or step. Kinds: kill (default, SIGKILL), exit, throw, segfault, stop (SIGSTOP), enospc (an error as
// from a full disk), nan, skip (what follows the point is left out), and usr1, usr2, term, int (the process sends
// itself that signal, to test requests at a known step).
//
// Points, in the order of a step: step; data-wait; data-read (in the thread that loads batches; its step is the number
// of the batch since the start; nan corrupts the batch); clip-factors (skip: gradients of records are not scaled down,
// which breaks the guarantee of a private step); collective (every collective call, in any thread). Points of a
// checkpoint: after-open, mid-dataset, before-close, before-fsync, before-manifest, before-rename, mid-replace (only if
// a checkpoint of that step exists), after-rename, before-latest, mid-delete; of its copy to the run directory
// (checkpoint.local): mid-copy, before-copy-fsync. Points of the lease of the run directory (rank 0, step 0):
// lease-created, lease-written, lease-renew. Points of commands that write files: input-open (every file that is read),
// output-begin (its directory is there, and empty), output-open (a file is there, and empty), before-publish,
// mid-publish (between the renames). At the end of the program: leave (MPI still runs), finalize (before MPI_Finalize).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::fault {

enum class Kind { none, kill, exit, throw_error, segfault, stop, enospc, nan, skip, usr1, usr2, term, interrupt };

namespace detail {
extern bool armed;
extern std::atomic<int> rank;
extern std::atomic<std::int64_t> step;
Kind fire(std::string_view name, int rank, std::int64_t step);
}  // namespace detail

/// Injects the fault requested for this point, if any. Returns `nan` if the caller must corrupt its numbers, `skip`
/// if it must leave out what follows, else `none`. Throws Error(internal) for `throw`, Error(io) for `enospc`,
/// Error(usage) if WEFT_FAULT is invalid.
inline Kind point(std::string_view name, int rank, std::int64_t step) {
  return detail::armed ? detail::fire(name, rank, step) : Kind::none;
}

/// Rank and step of this process, for points in modules that have neither.
inline void note_rank(int rank) { detail::rank = rank; }
inline void note_step(std::int64_t step) { detail::step = step; }
inline Kind point(std::string_view name) {
  return detail::armed ? detail::fire(name, detail::rank, detail::step) : Kind::none;
}

/// Requests a fault from inside the program, in the syntax of WEFT_FAULT; "" cancels it. Not thread-safe.
void order(const std::string& request);

}  // namespace weft::fault

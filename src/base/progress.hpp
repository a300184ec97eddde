// SPDX-License-Identifier: Apache-2.0
//
// Progress of this process, which the watchdog monitors (parallel/watchdog.hpp). Loops that may take long without an
// exchange between ranks call `note_progress` once per piece of work: a file segment, a block of rows, a tensor.
#pragma once

#include <atomic>
#include <cstdint>

namespace weft {

namespace detail {
inline std::atomic<std::uint64_t> progress{0};
inline thread_local bool progress_counts = true;
}  // namespace detail

/// Counts one piece of work. From any thread.
inline void note_progress() {
  if (detail::progress_counts) detail::progress.fetch_add(1, std::memory_order_relaxed);
}

/// Number of pieces of work so far.
inline std::uint64_t noted_progress() { return detail::progress.load(std::memory_order_relaxed); }

/// Ignores `note_progress` of the calling thread. For work that must not count as progress of a job that hangs, such
/// as the periodic verification of checkpoints.
inline void ignore_progress_of_this_thread() { detail::progress_counts = false; }

}  // namespace weft

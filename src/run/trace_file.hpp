// SPDX-License-Identifier: Apache-2.0
//
// The time line of base/trace.hpp as a file in Chrome's trace event format, which Perfetto and chrome://tracing show.
// One process per rank; threads: steps and their phases on the host, exchanges, reader, writer, and in a CUDA build the
// device's phases and exchanges. Times are microseconds since the first recorded step of the rank.
#pragma once

#include <filesystem>
#include <string>

#include "base/trace.hpp"
#include "parallel/world.hpp"

namespace weft::run {

inline constexpr int kMostRanksInTrace = 16;  ///< bounds the file: later ranks are left out

/// Collective. Rank 0 writes `path`. Throws Error(io).
void write_trace(const std::filesystem::path& path, const trace::Recording&, const parallel::World&);

/// The events of one rank as JSON objects separated by commas. Complete events ("ph": "X") of one thread are properly
/// nested: a row whose events overlap otherwise is split into several threads.
std::string trace_events(const trace::Recording&, int rank, const std::string& host);

}  // namespace weft::run

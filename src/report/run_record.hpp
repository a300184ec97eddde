// SPDX-License-Identifier: Apache-2.0
//
// run.json: what ran, where, with which input, how long, and how it ended. The document of this process is filled on
// the way; it is written when the run directory is known, and again at the end, whatever the end is. Names that others
// rely on:
//
//   build.{version,revision,modified,compiler,build_type,cuda}   libraries.*   ranks   hosts[].{host,device,ranks[]}
//   input.<table>.<key>   device.peak_bytes   timings.<region>.{min,mean,max,count}
//   result.{step,tokens,tokens_per_second,train,validation,recovery}   exit.{code,reason}
//
// exit.code is null while the run goes on. Not for use by several threads.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "base/error.hpp"
#include "report/json.hpp"

namespace weft::parallel {
class World;
}

namespace weft::report {

/// The document. Any part may be set at any time.
Json& run_record();

/// Fills command line, time, build, libraries (name -> version), ranks and hosts. Collective. `device` is this rank's.
void record_start(const parallel::World& world, const std::string& command_line,
                  const std::map<std::string, std::string>& libraries, const std::string& device);

/// Where the record goes from now on. Every rank says so; rank 0 writes it at once. Throws Error(io).
void record_to(const std::filesystem::path& path, const parallel::World& world);

/// Sets exit.code, exit.reason, the time, and writes the file (when `record_to` was called). Called by rank 0, or by
/// the one rank that knows of an error. Never throws: a run that cannot write its record has said so in the log and
/// ends as it would.
void record_end(int code, const std::string& reason) noexcept;

/// What a code means: "finished", "stopped cleanly, more to do", "stopped by signal 15, resumable".
std::string exit_reason(int code);

}  // namespace weft::report

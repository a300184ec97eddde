// SPDX-License-Identifier: Apache-2.0
//
// run.json: what ran, where, with which input, how long, and how it ended. The document of this process is filled while
// it runs; it is written when the run directory is known, and again at the end, also after an error. Names that other
// programs rely on:
//
//   build.{version,revision,modified,compiler,build_type,cuda}   libraries.*   ranks
//   hosts[].{host,device,ranks[],cpus[]} input.<table>.<key>   device.peak_bytes   timings.<phase>.{min,mean,max,count}
//   clipping.mode             of private training of a language model: what privacy.mode = "auto" has chosen
//   result.{step,tokens,tokens_per_second,train,validation,recovery}   exit.{code,reason}   start_number
//
// exit.code is null while the run is active; start_number counts the starts of the run from 1. Not thread-safe, unless
// a function says so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "base/error.hpp"
#include "storage/json_file.hpp"

namespace weft::parallel {
class World;
}

namespace weft::run {

/// The run record of this process. Any part may be set at any time.
Json& run_record();

/// Fills command line, time, build, libraries (name -> version), ranks and hosts. `device` describes this rank's.
/// Collective.
void record_start(const parallel::World& world, const std::string& command_line,
                  const std::map<std::string, std::string>& libraries, const std::string& device);

/// Sets the path of the run record on this rank; "" = none. Nothing is written before `record_running` or `record_end`.
/// `lease`: the number of the lease of this start (checkpoint/lease.hpp), which distinguishes its run record from
/// those of earlier ones; 0: none. Called by every rank.
void record_to(const std::filesystem::path& path, std::int64_t lease = 0);

/// Writes the run record as that of an active run, on rank 0. Collective. Throws a collective Error(io).
void record_running(const parallel::World& world);

/// Sets exit.code, exit.reason and the time, and writes the file (if `record_to` was called). Called by rank 0, or by
/// the only rank that knows of an error. Does not throw: failure to write is logged and does not change how the run
/// ends.
void record_end(int code, const std::string& reason) noexcept;

/// The path given to `record_to`; empty before. From any thread.
std::filesystem::path record_path();

/// Replaces `exit` in the run record at `path` and keeps the rest: for a rank, or a thread, that ends the job although
/// rank 0 cannot write the record any more. A record of a finished run (exit.code 0) is left as it is: all its results
/// are in it. Does nothing if the path is empty. From any thread. Does not throw, as `record_end`.
void record_failure(const std::filesystem::path& path, int code, const std::string& message) noexcept;

/// The run record at `path`; null if it cannot be read or is no JSON object. From any thread.
Json stored_record(const std::filesystem::path& path);
/// exit.code of a run record; -1 if it has none.
int exit_code_of(const Json& record);

/// The meaning of an exit code: "finished", "stopped cleanly, more to do", "stopped by signal 15, resumable".
std::string exit_reason(int code);

}  // namespace weft::run

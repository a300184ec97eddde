// SPDX-License-Identifier: Apache-2.0
#include "run/run_record.hpp"

#include <fmt/chrono.h>

#include <chrono>
#include <fstream>
#include <mutex>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "parallel/affinity.hpp"
#include "parallel/world.hpp"
#include "run/build.hpp"
#include "run/log_session.hpp"

namespace weft::run {
namespace {

Json document = Json::object();
std::mutex file_mutex;
std::filesystem::path file;        // guarded by the mutex: `record_path` is called by other threads
std::int64_t number_of_lease = 0;  // likewise
const auto program_start = Clock::now();

std::string now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

/// Sets how a start ended: `exit` and the entries next to it.
void set_end(Json& record, int code, const std::string& reason) {
  record["exit"] = {{"code", code}, {"reason", reason}};
  if (current_step() >= 0) record["exit"]["step"] = current_step();
  record["ended"] = now();
  record["seconds"] = seconds_since(program_start);
}

std::int64_t lease_number() {
  const std::scoped_lock lock(file_mutex);
  return number_of_lease;
}

/// True if a run record is of the start with this lease.
bool is_of_start(const Json& record, std::int64_t lease) {
  return lease > 0 && record.is_object() && record.contains("lease") && record["lease"] == lease;
}

/// True if another rank has recorded how this start ended: this one was stopped, and continues while the job is killed.
bool ended_by_another_rank(const std::filesystem::path& path) {
  const Json stored = stored_record(path);
  return is_of_start(stored, lease_number()) && exit_code_of(stored) >= 0;
}

/// Runs `write`. A failure is logged: it does not change how the run ends.
template <class Write>
void write_or_warn(Write&& write) noexcept {
  try {
    try {
      write();
    } catch (const std::exception& failure) {
      log::warning("the record of this run was not written: {}", failure.what());
    }
  } catch (...) {  // failure of the log
  }
}

}  // namespace

Json& run_record() { return document; }

void record_start(const parallel::World& world, const std::string& command_line,
                  const std::map<std::string, std::string>& libraries, const std::string& device) {
  document["command"] = command_line;
  document["started"] = now();
  document["build"] = {{"version", build_record.version},       {"revision", build_record.revision},
                       {"modified", build_record.modified},     {"compiler", build_record.compiler},
                       {"build_type", build_record.build_type}, {"cuda", build_record.cuda}};
  document["libraries"] = libraries;
  document["ranks"] = world.size();
  document["hosts"] = Json::array();
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::string host = world.all().broadcast(world.host(), rank);
    const std::string what = world.all().broadcast(device, rank);
    const std::string cpus = world.all().broadcast(parallel::cpus_text(), rank);
    Json* entry = nullptr;
    for (Json& known : document["hosts"])
      if (known["host"] == host && known["device"] == what) entry = &known;
    if (entry == nullptr)
      entry = &document["hosts"].emplace_back(
          Json{{"host", host}, {"device", what}, {"ranks", Json::array()}, {"cpus", Json::array()}});
    (*entry)["ranks"].push_back(rank);
    (*entry)["cpus"].push_back(cpus);
  }
}

void record_to(const std::filesystem::path& path, std::int64_t lease) {
  const std::scoped_lock lock(file_mutex);
  file = path;
  number_of_lease = lease;
  document["lease"] = lease;
}

void record_running(const parallel::World& world) {
  // All ranks have the path: any rank that ends the run can write the reason, and rank 0 does not write after that.
  world.all().barrier();
  document["exit"] = {{"code", nullptr}, {"reason", "running"}};
  world.on_root([&] {
    if (ended_by_another_rank(record_path())) return;
    storage::write_json(record_path(), document);
  });
}

void record_end(int code, const std::string& reason) noexcept {
  write_or_warn([&] {
    set_end(document, code, reason);
    if (const std::filesystem::path path = record_path(); !path.empty() && !ended_by_another_rank(path))
      storage::write_json(path, document);
  });
}

std::filesystem::path record_path() {
  const std::scoped_lock lock(file_mutex);
  return file;
}

void record_failure(const std::filesystem::path& path, int code, const std::string& message) noexcept {
  if (path.empty()) return;  // no run directory yet
  write_or_warn([&] {
    Json record = stored_record(path);
    if (exit_code_of(record) == 0) return;
    const std::int64_t lease = lease_number();
    if (lease > 0 && !is_of_start(record, lease)) record = {{"lease", lease}};  // it was of an earlier start
    set_end(record, code, message);
    storage::write_json(path, record);
  });
}

Json stored_record(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return nullptr;
  std::ifstream stored(path);
  Json record = parse_json(std::string(std::istreambuf_iterator<char>(stored), {}));
  return record.is_object() ? record : Json();
}

int exit_code_of(const Json& record) {
  const Json* at = &record;
  for (const char* name : {"exit", "code"}) {
    if (!at->is_object() || !at->contains(name)) return -1;
    at = &(*at)[name];
  }
  return at->is_number_integer() ? at->get<int>() : -1;
}

std::string exit_reason(int code) {
  switch (static_cast<ExitCode>(code)) {
    case ExitCode::finished:
      return "finished";
    case ExitCode::internal:
      return "internal error";
    case ExitCode::usage:
      return "wrong input or usage";
    case ExitCode::data:
      return "damaged or unsuitable data";
    case ExitCode::numeric:
      return "a number is not finite";
    case ExitCode::communication:
      return "a rank is lost or hangs";
    case ExitCode::io:
      return "a file cannot be read or written, or no valid checkpoint";
    case ExitCode::requeue:
      return "stopped cleanly, more to do";
    case ExitCode::no_progress:
      return "no progress since the last start";
  }
  if (code > 128 && code < 128 + 65) return fmt::format("stopped by signal {}, resumable", code - 128);
  return fmt::format("unknown exit code {}", code);
}

}  // namespace weft::run

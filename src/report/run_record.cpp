// SPDX-License-Identifier: Apache-2.0
#include "report/run_record.hpp"

#include <fmt/chrono.h>

#include <chrono>

#include "base/log.hpp"
#include "parallel/world.hpp"
#include "report/build.hpp"
#include "report/log.hpp"

namespace weft::report {
namespace {

Json document = Json::object();
std::filesystem::path file;
const auto program_start = std::chrono::steady_clock::now();

std::string now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
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
    Json* entry = nullptr;
    for (Json& known : document["hosts"])
      if (known["host"] == host && known["device"] == what) entry = &known;
    if (entry == nullptr)
      entry = &document["hosts"].emplace_back(Json{{"host", host}, {"device", what}, {"ranks", Json::array()}});
    (*entry)["ranks"].push_back(rank);
  }
}

void record_to(const std::filesystem::path& path, const parallel::World& world) {
  file = path;
  document["exit"] = {{"code", nullptr}, {"reason", "running"}};
  if (world.is_root()) write_json(file, document);
}

void record_end(int code, const std::string& reason) noexcept {
  try {
    document["exit"] = {{"code", code}, {"reason", reason}};
    if (current_step() >= 0) document["exit"]["step"] = current_step();
    document["ended"] = now();
    document["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - program_start).count();
    if (!file.empty()) write_json(file, document);
  } catch (const std::exception& failure) {
    try {
      log::warning("the record of this run was not written: {}", failure.what());
    } catch (...) {
    }
  }
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

}  // namespace weft::report

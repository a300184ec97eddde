// SPDX-License-Identifier: Apache-2.0
#include "report/metrics.hpp"

#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "base/contract.hpp"
#include "base/error.hpp"

namespace weft::report {
namespace {

/// Bytes at the start of the file that are whole records of steps <= last.
std::int64_t bytes_to_keep(const std::filesystem::path& path, std::int64_t last) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> line(1 << 20);  // longer lines are not records
  std::int64_t kept = 0;
  while (file.getline(line.data(), static_cast<std::streamsize>(line.size())) && !file.eof()) {
    const Json record = Json::parse(line.data(), nullptr, false);
    if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer()) break;
    if (record["step"].get<std::int64_t>() > last) break;
    kept += file.gcount();
  }
  return kept;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& path, std::int64_t resumed_step) : path_(path) {
  // Only a regular file can be truncated; a pipe or device is only written to.
  std::error_code failure;
  if (std::filesystem::is_regular_file(path, failure)) {
    std::filesystem::resize_file(path, static_cast<std::uintmax_t>(bytes_to_keep(path, resumed_step)), failure);
    if (failure)
      throw error(ExitCode::io, "{}: cannot be truncated to step {} ({})", path.string(), resumed_step,
                  failure.message());
  }
  errno = 0;
  file_.open(path, std::ios::binary | std::ios::app);
  if (!file_) throw error(ExitCode::io, "{}: cannot be opened ({})", path.string(), std::strerror(errno));
}

void MetricsWriter::write(const Json& record) {
  WEFT_ASSERT(record.contains("step"));
  errno = 0;
  file_ << to_text(record) << '\n' << std::flush;
  if (!file_) throw error(ExitCode::io, "{}: cannot be written ({})", path_.string(), std::strerror(errno));
}

}  // namespace weft::report

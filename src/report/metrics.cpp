// SPDX-License-Identifier: Apache-2.0
#include "report/metrics.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "base/contract.hpp"
#include "report/ownership.hpp"

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

MetricsWriter::MetricsWriter(const std::filesystem::path& path, std::int64_t resumed_step)
    : path_(path), file_(open_own(path, O_RDWR | O_CREAT | O_APPEND)) {
  // Only a regular file can be truncated; a device is only written to.
  if (std::filesystem::is_regular_file(path) && ::ftruncate(file_, bytes_to_keep(path, resumed_step)) != 0)
    fail_with_errno(path, "truncating");
}

void MetricsWriter::write(const Json& record) {
  WEFT_ASSERT(record.contains("step"));
  require_ownership();
  write_all(file_, to_text(record) + '\n', path_);
}

}  // namespace weft::report

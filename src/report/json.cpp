// SPDX-License-Identifier: Apache-2.0
#include "report/json.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/error.hpp"

namespace weft::report {

Json with_finite_numbers(Json value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::isnan(number)) return "nan";
    if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  } else if (value.is_structured()) {
    for (auto& member : value) member = with_finite_numbers(std::move(member));
  }
  return value;
}

std::string to_text(const Json& value, int indent) {
  return with_finite_numbers(value).dump(indent, ' ', false, Json::error_handler_t::replace);
}

void write_json(const std::filesystem::path& path, const Json& value) {
  write_json_text(path, to_text(value, 2) + "\n");
}

void write_json_text(const std::filesystem::path& path, std::string_view text) {
  // The process id in the name: two processes that record the end of one job use different temporary files.
  const std::string temporary = fmt::format("{}.{}.tmp", path.string(), getpid());
  const auto fail = [&](const char* what) {
    const int reason = errno;
    unlink(temporary.c_str());
    throw error(ExitCode::io, "{}: {} ({})", path.string(), what, std::strerror(reason));
  };
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail("cannot be created");
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t n = ::write(file, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int reason = errno;
      close(file);
      errno = reason;
      fail("cannot be written");
    }
    written += static_cast<std::size_t>(n);
  }
  const bool synced = fsync(file) == 0;
  if (close(file) != 0 || !synced) fail("cannot be written");
  if (rename(temporary.c_str(), path.c_str()) != 0) fail("cannot be renamed into place");
}

}  // namespace weft::report

// SPDX-License-Identifier: Apache-2.0
#include "base/system.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace weft {

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string random_hex(std::size_t digits) {
  std::string bytes((digits + 1) / 2, '\0'), text;
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw error(ExitCode::internal, "getrandom failed ({})", std::strerror(errno));
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text.substr(0, digits);
}

}  // namespace weft

// SPDX-License-Identifier: Apache-2.0
#include "base/system.hpp"

#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>

#include "base/error.hpp"

namespace weft {

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

int usable_cpus() {
  std::uint64_t mask[128] = {};  // bits of 8,192 CPUs
  int count = 0;
  if (::sched_getaffinity(0, sizeof mask, reinterpret_cast<cpu_set_t*>(mask)) == 0)
    for (const std::uint64_t part : mask) count += std::popcount(part);
  return count > 0 ? count : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

std::string random_hex(std::size_t digits) {
  std::string bytes((digits + 1) / 2, '\0'), text;
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw error(ExitCode::internal, "getrandom failed ({})", std::strerror(errno));
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text.substr(0, digits);
}

}  // namespace weft

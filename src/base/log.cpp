// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <cstdio>
#include <mutex>

#include "base/text.hpp"

namespace weft::log {
namespace {

std::mutex mutex;
Sink current_sink = [](Level level, std::string_view line) {
  if (level != Level::info) fmt::print(stderr, "{}\n", line);
};

}  // namespace

void set_sink(Sink sink) {
  const std::lock_guard lock(mutex);
  current_sink = std::move(sink);
}

void write(Level level, std::string_view line) {
  const std::lock_guard lock(mutex);
  current_sink(level, printable_lines(line));
}

}  // namespace weft::log

// SPDX-License-Identifier: Apache-2.0
//
// Where messages go. Every room may log; only report/ decides what becomes of a line. Until it has installed a sink,
// warnings and errors go to standard error and the rest is dropped.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string_view>
#include <utility>

namespace weft::log {

enum class Level { info, warning, error };

using Sink = std::function<void(Level, std::string_view line)>;

/// Replaces the sink. Not to be called while other threads log.
void set_sink(Sink sink);

/// Passes one line to the sink. Callable from any thread: the sink is never entered twice at a time.
void write(Level level, std::string_view line);

template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::warning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::error, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace weft::log

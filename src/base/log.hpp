// SPDX-License-Identifier: Apache-2.0
//
// Log messages. Every module may log; report/ installs the sink that prints and stores lines. Before that, warnings and
// errors are written to standard error, and other lines are dropped.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string_view>
#include <utility>

namespace weft::log {

enum class Level { info, warning, error };

using Sink = std::function<void(Level, std::string_view line)>;

/// Replaces the sink. Must not be called while other threads log.
void set_sink(Sink sink);

/// Passes one line to the sink, with control characters escaped (base/text.hpp). Thread-safe: calls of the sink are
/// serialised.
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

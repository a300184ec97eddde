// SPDX-License-Identifier: Apache-2.0
#include "report/log.hpp"

#include <fcntl.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>

#include "base/file.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "report/format.hpp"
#include "report/ownership.hpp"

namespace weft::report {
namespace {

std::atomic<std::int64_t> step_now{-1};

/// Appends lines to a file of the run directory, as long as the run owns the directory.
class FileSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(const std::filesystem::path& path)
      : path_(path), file_(open_own(path, O_WRONLY | O_CREAT | O_APPEND)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!owns_run_directory()) return;
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    write_all(file_, {line.data(), line.size()}, path_);  // the logger reports what this throws
  }
  void flush_() override {}

  std::filesystem::path path_;
  Descriptor file_;
};

/// The state of the sink. base/log.hpp serialises calls of the sink.
struct Output {
  int rank = 0;
  bool terminal = false;
  bool line_open = false;  // the terminal shows a status line
  std::shared_ptr<spdlog::logger> out, err, file;

  void clear_status() {
    if (!line_open) return;
    std::fputs("\r\x1b[K", stdout);
    std::fflush(stdout);
    line_open = false;
  }

  void write(log::Level level, std::string_view line) {
    const std::string_view mark = level == log::Level::warning ? "warning: " : "";
    if (rank != 0) {
      // An error reported by main already names its rank.
      const std::string name = fmt::format("rank {}", rank);
      if (level != log::Level::info)
        err->error("{}{}{}", line.find(name) == std::string_view::npos ? name + ": " : "", mark, line);
      return;
    }
    clear_status();
    if (level == log::Level::info)
      out->info("{}", line);
    else
      err->error("{}{}", mark, line);
    if (file) file->info("{}{}", mark, line);
  }

  void status(std::string_view line) {
    if (rank != 0) return;
    if (file) file->info("{}", line);
    if (!terminal) return out->info("{}", line);
    fmt::print("\r{}\x1b[K", line);
    std::fflush(stdout);
    line_open = true;
  }
};

std::unique_ptr<Output> output;

template <class Sink, class... Args>
std::shared_ptr<spdlog::logger> make_logger(const char* pattern, Args&&... args) {
  auto logger = std::make_shared<spdlog::logger>("weft", std::make_shared<Sink>(std::forward<Args>(args)...));
  logger->set_pattern(pattern);
  logger->flush_on(spdlog::level::trace);
  return logger;
}

}  // namespace

LogSession::LogSession(int rank) {
  output = std::make_unique<Output>();
  output->rank = rank;
  // mpiexec gives rank 0 a pseudo-terminal as its output wherever that goes, but never as its errors.
  output->terminal = isatty(STDOUT_FILENO) == 1 && isatty(STDERR_FILENO) == 1;
  output->out = make_logger<spdlog::sinks::stdout_sink_mt>("%v");
  output->err = make_logger<spdlog::sinks::stderr_sink_mt>("%v");
  log::set_sink([](log::Level level, std::string_view line) { output->write(level, line); });
}

LogSession::~LogSession() {
  log::set_sink([](log::Level level, std::string_view line) {
    if (level != log::Level::info) fmt::print(stderr, "{}\n", line);
  });
  output->clear_status();
  output.reset();
}

void log_to_file(const std::filesystem::path& path) {
  if (!output || output->rank != 0) return;
  output->file = make_logger<FileSink>("%Y-%m-%d %H:%M:%S %v", path);
}

void status(std::string_view line) {
  if (output) output->status(line);
}

std::string progress_text(const Progress& p) {
  std::string text = fmt::format(
      "step {}/{}  {}  {} {}/s", p.step, p.steps, p.metrics,
      std::isfinite(p.per_second) && p.per_second < 1e15 ? grouped(std::llround(p.per_second)) : "?", p.unit);
  if (p.percent_of_limit >= 0) text += fmt::format("  {:.0f} % of the limit", p.percent_of_limit);
  if (p.seconds_left >= 0) text += fmt::format("  {} left", duration(p.seconds_left));
  return text;
}

std::int64_t current_step() { return step_now.load(std::memory_order_relaxed); }
void set_current_step(std::int64_t step) {
  step_now.store(step, std::memory_order_relaxed);
  if (step >= 0)
    trace::next_step();
  else
    trace::end_steps();
}

}  // namespace weft::report

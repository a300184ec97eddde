// SPDX-License-Identifier: Apache-2.0
#include "run/log_session.hpp"

#include <fcntl.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.hpp"
#include "base/file.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "base/trace.hpp"
#include "storage/ownership.hpp"

namespace weft::run {
namespace {

std::atomic<std::int64_t> step_now{-1};

/// Characters that fit into a line of the terminal now. A longer line would wrap and could not be replaced.
std::size_t columns(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col < 2) return std::string_view::npos;
  return size.ws_col - std::size_t{1};  // some terminals wrap after the last column
}

/// Appends lines to a file of the run directory, as long as the run owns the directory.
class FileSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(const std::filesystem::path& path)
      : path_(path), file_(open_own(path, O_WRONLY | O_CREAT | O_APPEND)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!storage::owns_run_directory()) return;
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    write_all(file_, {line.data(), line.size()}, path_);  // the logger reports what this throws
  }
  void flush_() override {}

  std::filesystem::path path_;
  Descriptor file_;
};

constexpr std::chrono::milliseconds kRedraw{100};

/// True if lines on this descriptor may have colours.
bool has_colours(int descriptor) {
  const char* const no_colour = std::getenv("NO_COLOR");
  return isatty(descriptor) == 1 && (no_colour == nullptr || *no_colour == '\0');
}

bool is_dumb() {
  const char* const name = std::getenv("TERM");
  return name == nullptr || std::string_view(name) == "dumb";
}

/// The state of the sink.
struct Output {
  std::mutex mutex;  // protects lines, results and the live line
  int rank = 0;
  Verbosity verbosity = Verbosity::normal;
  bool json = false;
  bool terminal = false;  // there is a live line
  bool colours_out = false, colours_err = false;
  std::string line;  // the live one; "" if there is none
  Clock::time_point start = Clock::now(), drawn;
  std::shared_ptr<spdlog::logger> out, err, file;
  std::filesystem::path errors_to;  // log.txt, for errors of ranks other than 0
  std::vector<std::string> early;   // warnings of rank 0 before the file is known

  /// Standard output, or with --json standard error.
  std::FILE* stream() const { return json ? stderr : stdout; }

  void draw() {
    if (line.empty()) return;
    const std::string shown = line.substr(0, columns(fileno(stream())));
    fmt::print(stream(), "\r{}{}{}\x1b[K", colours_out ? "\x1b[2m" : "", shown, colours_out ? "\x1b[0m" : "");
    std::fflush(stream());
  }
  void erase() {
    if (line.empty()) return;
    std::fputs("\r\x1b[K", stream());
    std::fflush(stream());
  }
  /// Calls `print` without the live line.
  template <class Print>
  void above_live(Print&& print) {
    erase();
    print();
    draw();
  }

  void info(std::string_view text) {
    above_live([&] { (json ? err : out)->info("{}", text); });
  }

  void write(log::Level level, std::string_view text) {
    const std::lock_guard lock(mutex);
    const std::string_view mark = level == log::Level::warning ? "warning: " : "";
    if (rank != 0) {
      // An error reported by main already names its rank.
      const std::string name = fmt::format("rank {}", rank);
      if (level != log::Level::info)
        err->error("{}{}{}", text.find(name) == std::string_view::npos ? name + ": " : "", mark, text);
      if (level == log::Level::error && !errors_to.empty()) append_error(text);
      return;
    }
    if (level == log::Level::info) {
      if (verbosity != Verbosity::quiet) info(text);
    } else {
      above_live([&] {
        // The first word is coloured: "warning:", "error:".
        const std::string whole = fmt::format("{}{}", mark, text);
        const std::size_t end = std::min(whole.find(' '), whole.size());
        const char* const colour = level == log::Level::warning ? "\x1b[33m" : "\x1b[31m";
        err->error("{}{}{}{}", colours_err ? colour : "", whole.substr(0, end), colours_err ? "\x1b[0m" : "",
                   whole.substr(end));
      });
    }
    if (file)
      file->info("{}{}", mark, text);
    else if (level == log::Level::warning)
      early.push_back(fmt::format("{}{}", mark, text));
  }

  /// The rank is about to end the job: rank 0 may not be able to say why.
  void append_error(std::string_view text) const;

  void result(std::string_view text) {
    const std::lock_guard lock(mutex);
    if (rank != 0) return;
    above_live([&] { out->info("{}", text); });
    if (file) file->info("{}", text);
  }

  void document(std::string_view text) {
    const std::lock_guard lock(mutex);
    if (rank == 0) above_live([&] { out->info("{}", text); });
  }

  void status(const Progress& progress) {
    const std::lock_guard lock(mutex);
    if (rank != 0) return;
    if (file) file->info("{}", progress_text(progress));
    if (verbosity != Verbosity::quiet)
      info(progress_text(progress, terminal ? columns(fileno(stream())) : std::string::npos));
  }

  void live(std::int64_t step, std::int64_t steps, double seconds_left) {
    const std::lock_guard lock(mutex);
    if (rank != 0 || !terminal || verbosity == Verbosity::quiet) return;
    const Clock::time_point now = Clock::now();
    if (!line.empty() && now - drawn < kRedraw) return;
    drawn = now;
    line = fmt::format("step {}/{}  {:.0f} %  {} left", step, steps,
                       100 * static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, steps)),
                       format::duration(seconds_left));
    draw();
  }
  void end_live() {
    const std::lock_guard lock(mutex);
    erase();
    line.clear();
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

constexpr const char* kFilePattern = "%Y-%m-%d %H:%M:%S %v";

void Output::append_error(std::string_view line) const {
  try {
    make_logger<FileSink>(kFilePattern, errors_to)->info("{}", line);
  } catch (const Error&) {  // not reachable from this node: the line is on standard error
  }
}

}  // namespace

LogSession::LogSession(int rank) {
  output = std::make_unique<Output>();
  output->rank = rank;
  output->out = make_logger<spdlog::sinks::stdout_sink_mt>("%v");
  output->err = make_logger<spdlog::sinks::stderr_sink_mt>("%v");
  set_output(Verbosity::normal, false);
  log::set_sink([](log::Level level, std::string_view line) { output->write(level, line); });
}

LogSession::~LogSession() {
  log::set_sink([](log::Level level, std::string_view line) {
    if (level != log::Level::info) fmt::print(stderr, "{}\n", line);
  });
  output->end_live();
  output.reset();
}

void set_output(Verbosity verbosity, bool json) {
  if (!output) return;
  const std::lock_guard lock(output->mutex);
  output->verbosity = verbosity;
  output->json = json;
  // mpiexec gives rank 0 a pseudo-terminal as its output wherever that goes, but never as its errors.
  output->terminal = (json || isatty(STDOUT_FILENO) == 1) && isatty(STDERR_FILENO) == 1 && !is_dumb();
  output->colours_err = has_colours(STDERR_FILENO) && !is_dumb();
  output->colours_out = output->terminal && output->colours_err;
}

void result(std::string_view text) {
  if (output) output->result(printable_lines(text));
}

void json_document(std::string_view text) {
  if (output) output->document(text);
}

void detail(std::string_view line) {
  if (!output || output->rank != 0 || output->verbosity != Verbosity::verbose) return;
  log::info("{:9.3f} s  {}", std::chrono::duration<double>(Clock::now() - output->start).count(), line);
}

void log_to_file(const std::filesystem::path& path) {
  if (!output) return;
  if (output->rank != 0) {
    output->errors_to = path;
    return;
  }
  output->file = make_logger<FileSink>(kFilePattern, path);
  for (const std::string& line : output->early) output->file->info("{}", line);
  output->early.clear();
}

void status(const Progress& progress) {
  if (output) output->status(progress);
}

void live(std::int64_t step, std::int64_t steps, double seconds_left) {
  if (output) output->live(step, steps, seconds_left);
}

std::string progress_text(const Progress& p, std::size_t columns) {
  // The fields in the order of the line; those with the highest number are left out first.
  struct Field {
    std::string text;
    int left_out;
  };
  std::vector<Field> fields = {{fmt::format("step {}/{}", p.step, p.steps), 0}};
  int metric = 3;
  for (std::string_view rest = p.metrics; !rest.empty(); ++metric) {
    const std::size_t end = std::min(rest.find("  "), rest.size());
    fields.push_back({std::string(rest.substr(0, end)), metric == 3 ? 0 : metric});
    rest.remove_prefix(std::min(end + 2, rest.size()));
  }
  fields.push_back(
      {fmt::format(
           "{} {}/s",
           std::isfinite(p.per_second) && p.per_second < 1e15 ? format::grouped(std::llround(p.per_second)) : "?",
           p.unit),
       2});
  if (p.percent_of_limit >= 0) fields.push_back({fmt::format("{:.0f} % of the limit", p.percent_of_limit), metric});
  if (p.seconds_left >= 0) fields.push_back({fmt::format("{} left", format::duration(p.seconds_left)), 1});
  if (!p.memory.empty()) fields.push_back({p.memory, metric + 1});
  for (;;) {
    std::string text;
    for (const Field& field : fields) text += (text.empty() ? "" : "  ") + field.text;
    const auto last = std::max_element(fields.begin(), fields.end(),
                                       [](const Field& a, const Field& b) { return a.left_out < b.left_out; });
    if (text.size() <= columns) return text;
    if (last->left_out == 0) return text.substr(0, columns);
    fields.erase(last);
  }
}

std::int64_t current_step() { return step_now.load(std::memory_order_relaxed); }
void set_current_step(std::int64_t step) {
  step_now.store(step, std::memory_order_relaxed);
  if (step >= 0) return trace::next_step();
  trace::end_steps();
  if (output) output->end_live();
}

}  // namespace weft::run

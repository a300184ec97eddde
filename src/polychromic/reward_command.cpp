// SPDX-License-Identifier: Apache-2.0
//
// Scores from a program: one process for all batches, that reads a line per prompt and writes a line per prompt.
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "polychromic/reward.hpp"

extern char** environ;

namespace weft::polychromic {
namespace {

using std::chrono::milliseconds;

/// Bytes of the scores of a batch at most: more is no list of scores.
constexpr std::size_t kMostBytes = std::size_t{64} << 20;
/// Time for a program to end, after the end of its input and after SIGTERM.
constexpr milliseconds kGrace{5000};

/// Writing to a pipe whose reader has ended gives EPIPE in the lifetime of this object, not a signal.
class WithoutPipeSignal {
 public:
  WithoutPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  WithoutPipeSignal(const WithoutPipeSignal&) = delete;
  ~WithoutPipeSignal() {
    const timespec now{};
    if (!was_pending_)
      while (sigtimedwait(&pipe_, nullptr, &now) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

/// A program with pipes to its standard input and output, and the group of its processes.
class Program {
 public:
  explicit Program(const std::string& command) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0) fail(command, errno);
    Descriptor reads(in[0]), writes(in[1]);
    if (pipe2(out, O_CLOEXEC) != 0) fail(command, errno);
    Descriptor from(out[0]), to(out[1]);
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&files, reads, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, to, STDOUT_FILENO);
    posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
    // A group of its own, which can be ended as a whole; signals as in a shell, not as this program handles them.
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setsigmask(&attributes, &none);
    std::string shell = "sh", option = "-c", text = command;
    char* const arguments[] = {shell.data(), option.data(), text.data(), nullptr};
    const int failed = posix_spawn(&process_, "/bin/sh", &files, &attributes, arguments, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (failed != 0) fail(command, failed);
    input_ = std::move(writes);
    output_ = std::move(from);
    fcntl(input_, F_SETFL, O_NONBLOCK);
    fcntl(output_, F_SETFL, O_NONBLOCK);
  }
  Program(const Program&) = delete;
  ~Program() { end(); }

  int input() const { return input_; }
  int output() const { return output_; }

  /// Ends the program and returns "exit status 3", "signal 9", or "it was ended" if it did not end by itself within
  /// `patience` of the end of its input.
  std::string end(milliseconds patience = kGrace) {
    if (process_ < 0) return ended_;
    input_ = Descriptor();
    siginfo_t info{};
    const bool by_itself = wait_for(patience, info);
    if (!by_itself) {
      kill(-process_, SIGTERM);
      wait_for(kGrace, info);
    }
    // The group exists until its first process has been waited for, whose number is then free again.
    kill(-process_, SIGKILL);
    while (waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED) != 0 && errno == EINTR) continue;
    process_ = -1;
    ended_ = !by_itself                   ? "it was ended"
             : info.si_code == CLD_EXITED ? fmt::format("exit status {}", info.si_status)
                                          : fmt::format("signal {}", info.si_status);
    return ended_;
  }

 private:
  [[noreturn]] static void fail(const std::string& command, int number) {
    throw error(ExitCode::io, "the command of the reward cannot be started: {} ({})", printable(command),
                std::strerror(number));
  }
  /// True: the first process has ended, and has not been waited for.
  bool wait_for(milliseconds time, siginfo_t& info) const {
    for (const Clock::time_point deadline = Clock::now() + time;;) {
      info = {};
      if (waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0)
        return true;
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  Descriptor input_, output_;
  pid_t process_ = -1;
  std::string ended_;
};

class CommandReward final : public Reward {
 public:
  CommandReward(std::string command, double time_limit) : command_(std::move(command)), time_limit_(time_limit) {}

  std::vector<std::vector<double>> scores(std::span<const AnsweredPrompt> prompts) override {
    std::string request;
    for (const AnsweredPrompt& prompt : prompts)
      request += json_text(Json{{"id", prompt.id},
                                {"prompt", prompt.prompt},
                                {"reference", prompt.reference},
                                {"answers", prompt.answers}}) +
                 "\n";
    const std::vector<std::string> lines = exchange(request, prompts.size());
    std::vector<std::vector<double>> scores;
    for (std::size_t i = 0; i < prompts.size(); ++i) scores.push_back(read(lines[i], prompts[i]));
    return scores;
  }

 private:
  template <class... Args>
  Error failed(ExitCode code, fmt::format_string<Args...> format, Args&&... args) const {
    return error(code, "the command of the reward, {}, {}", printable(command_),
                 fmt::format(format, std::forward<Args>(args)...));
  }

  /// Writes the request and reads as many lines.
  std::vector<std::string> exchange(std::string_view request, std::size_t count) {
    std::vector<std::string> lines;
    if (count == 0) return lines;
    if (program_)
      require_silence();
    else
      program_.emplace(command_);
    const WithoutPipeSignal without_signal;
    const Clock::time_point deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(time_limit_));
    std::string received;
    while (lines.size() < count) {
      note_progress();  // this loop has a time limit of its own
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
      pollfd files[] = {{program_->output(), POLLIN, 0}, {request.empty() ? -1 : program_->input(), POLLOUT, 0}};
      const int ready = left < 0 ? 0 : poll(files, 2, static_cast<int>(std::min<long long>(left + 1, 1000)));
      if (ready < 0 && errno != EINTR) throw failed(ExitCode::io, "cannot be waited for ({})", std::strerror(errno));
      if (ready == 0 && Clock::now() >= deadline) {
        program_->end(milliseconds(0));
        program_.reset();
        throw failed(ExitCode::io,
                     "has returned {} of {} lines within {} s and was ended; it must write one line per line that it "
                     "reads, at once (without buffering); raise the time limit if it needs longer",
                     lines.size(), count, time_limit_);
      }
      if (ready <= 0) continue;
      if (files[1].revents != 0) {
        const ssize_t written = write(program_->input(), request.data(), request.size());
        if (written > 0) request.remove_prefix(static_cast<std::size_t>(written));
        // The program does not read any more: what it has written, or its end, explains why.
        if (written < 0 && errno != EAGAIN && errno != EINTR) request = {};
      }
      if (files[0].revents != 0) receive(received, lines, count);
    }
    if (lines.size() > count || !received.empty() || !request.empty()) throw wrote_too_much();
    return lines;
  }

  /// Requires that the program writes nothing between batches: it would be taken for the next answer.
  void require_silence() {
    pollfd output = {program_->output(), POLLIN, 0};
    if (poll(&output, 1, 0) > 0 && (output.revents & POLLIN) != 0) throw wrote_too_much();
  }

  Error wrote_too_much() {
    program_.reset();
    return failed(ExitCode::data, "writes more than one line per line that it reads; it must write {} only",
                  kAnswerForm);
  }

  /// Divides the output of the program into lines.
  void receive(std::string& received, std::vector<std::string>& lines, std::size_t count) {
    char block[1 << 16];
    const ssize_t size = ::read(program_->output(), block, sizeof block);
    if (size < 0) {
      if (errno == EAGAIN || errno == EINTR) return;
      throw failed(ExitCode::io, "cannot be read from ({})", std::strerror(errno));
    }
    if (size == 0) {
      const std::string how = program_->end();
      program_.reset();
      throw failed(ExitCode::io, "ended after {} of {} lines ({}); it must run until its input ends", lines.size(),
                   count, how);
    }
    received.append(block, static_cast<std::size_t>(size));
    if (received.size() > kMostBytes) {
      program_.reset();
      throw failed(ExitCode::data, "writes a line of more than {} bytes; it must write {} only", kMostBytes,
                   kAnswerForm);
    }
    std::size_t begin = 0;
    for (std::size_t end; (end = received.find('\n', begin)) != received.npos; begin = end + 1)
      lines.push_back(received.substr(begin, end - begin));
    received.erase(0, begin);
  }

  std::vector<double> read(const std::string& line, const AnsweredPrompt& prompt) {
    const SortedJson object = parse_json<SortedJson>(line);
    const auto scores = object.is_object() ? object.find("scores") : object.end();
    if (!object.is_object() || scores == object.end() || !scores->is_array())
      throw failed(ExitCode::data, "writes \"{}\" for prompt \"{}\"; it must write {}", printable(line, 100),
                   printable(prompt.id, 60), kAnswerForm);
    if (const auto id = object.find("id"); id != object.end() && *id != prompt.id)
      throw failed(ExitCode::data,
                   "writes the scores of \"{}\" where those of prompt \"{}\" are next; it must write one line per line "
                   "that it reads, in this order",
                   printable(json_text(*id), 60), printable(prompt.id, 60));
    if (scores->size() != prompt.answers.size())
      throw failed(ExitCode::data, "returns {} scores for {} answers to prompt \"{}\"; one per answer is needed",
                   scores->size(), prompt.answers.size(), printable(prompt.id, 60));
    std::vector<double> values;
    for (const SortedJson& score : *scores) {
      if (!score.is_number() || !std::isfinite(score.get<double>()))
        throw failed(ExitCode::data, "returns a score that is not a finite number for answer {} to prompt \"{}\"",
                     values.size() + 1, printable(prompt.id, 60));
      values.push_back(score.get<double>());
    }
    return values;
  }

  static constexpr const char* kAnswerForm = "{\"scores\": [NUMBER, ...]}";
  const std::string command_;
  const double time_limit_;
  std::optional<Program> program_;
};

}  // namespace

std::unique_ptr<Reward> command_reward(std::string command, double time_limit) {
  return std::make_unique<CommandReward>(std::move(command), time_limit);
}

}  // namespace weft::polychromic

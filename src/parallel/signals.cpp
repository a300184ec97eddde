// SPDX-License-Identifier: Apache-2.0
#include "parallel/signals.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/error.hpp"

namespace weft::parallel {
namespace {

/// Requests to stop, with 128 + signal.
constexpr int kStops[] = {SIGHUP, SIGINT, SIGTERM, SIGXCPU};
constexpr int kOthers[] = {SIGUSR1, SIGUSR2};
constexpr int kIgnored[] = {SIGPIPE, SIGXFSZ};

volatile std::sig_atomic_t requeue = 0, checkpoint = 0;
volatile std::sig_atomic_t stop[std::size(kStops)] = {};

extern "C" void note_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
      requeue = 1;
      break;
    case SIGUSR2:
      checkpoint = 1;
      break;
    default:
      for (std::size_t i = 0; i < std::size(kStops); ++i) {
        if (kStops[i] != signal) continue;
        if (signal == SIGINT && stop[i] != 0) _exit(128 + SIGINT);
        stop[i] = 1;
      }
  }
}

}  // namespace

Signals::Signals() {
  requeue = 0;
  checkpoint = 0;
  for (volatile std::sig_atomic_t& flag : stop) flag = 0;
  const auto install = [this](int signal, void (*handler)(int)) {
    struct sigaction action;
    std::memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;  // reads and writes in progress continue
    sigemptyset(&action.sa_mask);
    Previous& previous = previous_.emplace_back(Previous{signal, {}});
    if (sigaction(signal, &action, &previous.action) != 0)
      throw error(ExitCode::internal, "cannot install the handler of signal {} ({})", signal, std::strerror(errno));
    // A program started with nohup outlives its terminal.
    if (signal == SIGHUP && previous.action.sa_handler == SIG_IGN) sigaction(signal, &previous.action, nullptr);
  };
  for (const int signal : kStops) install(signal, note_signal);
  for (const int signal : kOthers) install(signal, note_signal);
  for (const int signal : kIgnored) install(signal, SIG_IGN);
}

Signals::~Signals() {
  for (const Previous& one : previous_) sigaction(one.signal, &one.action, nullptr);
}

void Signals::let_stop() {
  for (const int signal : kStops) {
    struct sigaction present;
    if (sigaction(signal, nullptr, &present) == 0 && present.sa_handler == note_signal) std::signal(signal, SIG_DFL);
  }
}

Signals::Requested Signals::requested() {
  Requested request;
  // The larger code wins: a request to end the job has priority over a request to requeue it.
  if (requeue) request.stop = static_cast<std::int64_t>(ExitCode::requeue);
  for (std::size_t i = 0; i < std::size(kStops); ++i)
    if (stop[i]) request.stop = std::max(request.stop, static_cast<std::int64_t>(stopped_by(kStops[i])));
  if (checkpoint) {
    checkpoint = 0;
    request.checkpoint = 1;
  }
  return request;
}

}  // namespace weft::parallel

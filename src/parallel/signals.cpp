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

constexpr int kHandled[] = {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGXFSZ};

volatile std::sig_atomic_t requeue = 0, checkpoint = 0, terminated = 0, interrupted = 0;

extern "C" void note_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
      requeue = 1;
      break;
    case SIGUSR2:
      checkpoint = 1;
      break;
    case SIGTERM:
      terminated = 1;
      break;
    case SIGINT:
      if (interrupted) _exit(128 + SIGINT);
      interrupted = 1;
      break;
    default:
      break;
  }
}

}  // namespace

Signals::Signals() {
  for (volatile std::sig_atomic_t* flag : {&requeue, &checkpoint, &terminated, &interrupted}) *flag = 0;
  for (std::size_t i = 0; i < std::size(kHandled); ++i) {
    struct sigaction action;
    std::memset(&action, 0, sizeof action);
    if (kHandled[i] == SIGXFSZ)
      action.sa_handler = SIG_IGN;
    else
      action.sa_handler = note_signal;
    action.sa_flags = SA_RESTART;  // reads and writes in progress continue
    sigemptyset(&action.sa_mask);
    if (sigaction(kHandled[i], &action, &previous_[i]) != 0)
      throw error(ExitCode::internal, "cannot install the handler of signal {} ({})", kHandled[i],
                  std::strerror(errno));
  }
}

Signals::~Signals() {
  for (std::size_t i = 0; i < std::size(kHandled); ++i) sigaction(kHandled[i], &previous_[i], nullptr);
}

void Signals::let_stop() {
  for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, SIG_DFL);
}

Signals::Requested Signals::requested() {
  Requested request;
  // The larger code wins: a request to end the job has priority over a request to requeue it.
  if (requeue) request.stop = static_cast<std::int64_t>(ExitCode::requeue);
  if (interrupted) request.stop = std::max(request.stop, static_cast<std::int64_t>(stopped_by(SIGINT)));
  if (terminated) request.stop = std::max(request.stop, static_cast<std::int64_t>(stopped_by(SIGTERM)));
  if (checkpoint) {
    checkpoint = 0;
    request.checkpoint = 1;
  }
  return request;
}

}  // namespace weft::parallel

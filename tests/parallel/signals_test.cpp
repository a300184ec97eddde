// SPDX-License-Identifier: Apache-2.0
#include "parallel/signals.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.hpp"

namespace weft::parallel {

TEST_CASE("signals become requests, and a stop has priority over a requeue") {
  const Signals signals;
  CHECK(Signals::requested().stop == 0);
  CHECK(Signals::requested().checkpoint == 0);
  std::raise(SIGUSR2);
  CHECK(Signals::requested().checkpoint == 1);
  CHECK(Signals::requested().checkpoint == 0);  // returned once: else every step would write one
  std::raise(SIGUSR1);
  std::raise(SIGUSR1);
  CHECK(Signals::requested().stop == 75);
  CHECK(Signals::requested().stop == 75);  // persists
  std::raise(SIGINT);
  CHECK(Signals::requested().stop == 130);
  std::raise(SIGTERM);
  std::raise(SIGTERM);
  CHECK(Signals::requested().stop == 143);
}

TEST_CASE("a closed terminal and the limit of processor time request a stop with 128 + signal") {
  {
    const Signals signals;
    std::raise(SIGHUP);
    CHECK(Signals::requested().stop == 129);
    std::raise(SIGXCPU);
    CHECK(Signals::requested().stop == 152);
  }
  // nohup: what was ignored stays ignored.
  std::signal(SIGHUP, SIG_IGN);
  {
    const Signals signals;
    std::raise(SIGHUP);
    CHECK(Signals::requested().stop == 0);
    Signals::let_stop();
    std::raise(SIGHUP);
  }
  std::signal(SIGHUP, SIG_DFL);
}

TEST_CASE("exceeding a file-size limit or writing to a closed pipe does not kill; previous handlers are restored") {
  std::signal(SIGUSR1, SIG_DFL);  // whatever this process inherited
  {
    const Signals signals;
    std::raise(SIGXFSZ);
    std::raise(SIGPIPE);
  }
  struct sigaction now;
  sigaction(SIGUSR1, nullptr, &now);
  CHECK((now.sa_handler == SIG_DFL));
}

TEST_CASE("a second interrupt ends the process at once with 130") {
  const pid_t child = fork();
  if (child == 0) {
    const Signals signals;
    std::raise(SIGINT);
    std::raise(SIGINT);
    _exit(0);  // not reached
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 130);
}

TEST_CASE("after let_stop a stop request ends the process at once, and the notice of a scheduler does not") {
  const pid_t child = fork();
  if (child == 0) {
    const Signals signals;
    Signals::let_stop();
    std::raise(SIGUSR1);
    std::raise(SIGTERM);
    _exit(0);  // not reached
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGTERM);
}

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
//
// Requests by signal, from a scheduler before its time limit or from a user. Handlers only set flags; the ranks agree
// on the action during the step. A second SIGINT ends the process at once.
//
//   SIGUSR1          write a checkpoint and stop with 75, to be requeued
//   SIGUSR2          write a checkpoint and continue
//   SIGTERM, SIGINT  write a checkpoint and stop with 128 + signal
//   SIGHUP, SIGXCPU  the same (the terminal is closed, unless started with nohup; the limit of processor time)
//   SIGXFSZ          ignored: exceeding a file-size limit becomes an error of the write
//   SIGPIPE          ignored: output to a closed pipe is lost, log.txt continues
#pragma once

#include <csignal>
#include <cstdint>
#include <vector>

namespace weft::parallel {

/// Installs the handlers; the destructor restores the previous ones. One object at a time.
class Signals {
 public:
  Signals();
  Signals(const Signals&) = delete;
  ~Signals();

  struct Requested {
    std::int64_t stop = 0;        ///< exit code to stop with; 0 = continue. The ranks take the maximum
    std::int64_t checkpoint = 0;  ///< 1 = write a checkpoint
  };
  /// The requests so far. `stop` persists; a `checkpoint` is returned once.
  static Requested requested();

  /// From now on signals that request a stop end the process at once: all results are saved.
  static void let_stop();

 private:
  struct Previous {
    int signal;
    struct sigaction action;
  };
  std::vector<Previous> previous_;
};

}  // namespace weft::parallel

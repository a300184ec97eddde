// SPDX-License-Identifier: Apache-2.0
//
// Requests by signal, from a scheduler before its time limit or from a user. Handlers only set flags; the ranks agree
// on the action during the step. A second SIGINT ends the process at once.
//
//   SIGUSR1          write a checkpoint and stop with 75, to be requeued
//   SIGUSR2          write a checkpoint and continue
//   SIGTERM, SIGINT  write a checkpoint and stop with 128 + signal
//   SIGXFSZ          ignored: exceeding a file-size limit becomes an error of the write
#pragma once

#include <csignal>
#include <cstdint>

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

  /// From now on SIGTERM and SIGINT end the process at once: all results are saved.
  static void let_stop();

 private:
  struct sigaction previous_[5];
};

}  // namespace weft::parallel

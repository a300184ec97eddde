// SPDX-License-Identifier: Apache-2.0
//
// Requests from outside: a scheduler before its limit, a user. Handlers set flags and nothing else; what ranks do about
// them is agreed in the step. A second SIGINT leaves at once.
//
//   SIGUSR1          checkpoint and stop with 75, to be requeued
//   SIGUSR2          checkpoint and go on
//   SIGTERM, SIGINT  checkpoint and stop with 128 + signal
//   SIGXFSZ          ignored: a file-size limit becomes an error of the write
#pragma once

#include <csignal>
#include <cstdint>

namespace weft::parallel {

/// Installs the handlers; restores the former ones at its end. One object at a time.
class Signals {
 public:
  Signals();
  Signals(const Signals&) = delete;
  ~Signals();

  struct Requested {
    std::int64_t stop = 0;        ///< exit code to stop with, 0 = go on: over ranks the maximum is the agreement
    std::int64_t checkpoint = 0;  ///< 1 = write one
  };
  /// What was asked for. `stop` stays; a `checkpoint` is told once.
  static Requested requested();

  /// Everything is saved and only reading is left: from now on SIGTERM and SIGINT end the process at once.
  static void let_stop();

 private:
  struct sigaction former_[5];
};

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
//
// Reads that are repeated. A network file system reports EIO or ESTALE for intact files while a server restarts or a
// link is down: such an error does not show that a file is damaged.
#pragma once

#include "base/file.hpp"

namespace weft::storage {

/// Logs a warning and waits, longer after each attempt: 0.25 s to 8 s, about 16 s in all. Returns false at once after
/// the last attempt, and for errors that do not pass (no such file, no permission).
bool wait_to_retry(const SystemError& failure, int attempt);

/// Runs `read`, repeatedly while it throws a SystemError that may pass. `read` opens its files itself: a stale
/// descriptor stays stale.
template <class Read>
auto retried(Read&& read) {
  for (int attempt = 1;; ++attempt) {
    try {
      return read();
    } catch (const SystemError& failure) {
      if (!wait_to_retry(failure, attempt)) throw;
    }
  }
}

}  // namespace weft::storage

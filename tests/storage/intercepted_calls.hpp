// SPDX-License-Identifier: Apache-2.0
//
// flock and fsync of this test program are in the place of those of the C library.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace weft::testing {

/// Paths of what was synced, in this order.
extern std::vector<std::string> synced;
/// True: flock fails as on a file system without locks (NFS without a lock service).
extern std::atomic<bool> no_locks;

}  // namespace weft::testing

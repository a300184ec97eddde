// SPDX-License-Identifier: Apache-2.0
//
// The right of this process to write into its run directory. A run directory has one owner at a time; another run may
// take it over (checkpoint/lease.hpp). Every module calls these functions before it publishes, deletes or appends
// something there.
#pragma once

#include <functional>
#include <string>

namespace weft::storage {

/// `lost`: returns why the directory is not this process's any more, "" while it is; throws Error(io) if that cannot be
/// found out. Called from any thread. Before, and with an empty function, nothing is restricted: commands other than
/// train own no run directory.
void set_ownership(std::function<std::string()> lost);

/// False if the directory was lost, or if that cannot be found out. For what is left out then: lines of log.txt.
bool owns_run_directory() noexcept;

/// Ends the job with code 6 if the directory was lost. Throws Error(io) if that cannot be found out.
void require_ownership();

}  // namespace weft::storage

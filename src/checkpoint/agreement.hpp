// SPDX-License-Identifier: Apache-2.0
//
// What one rank alone runs into becomes known to all before anybody acts on it.
#pragma once

#include <optional>
#include <string>

#include "base/error.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint {

struct Failure {
  ExitCode code = ExitCode::internal;
  std::string message;
};

/// The failure that is being handled: call it inside a catch clause.
Failure current_failure();

/// Runs `function`; what it throws is returned.
template <class Function>
std::optional<Failure> attempt(Function&& function) {
  try {
    function();
  } catch (...) {
    return current_failure();
  }
  return std::nullopt;
}

/// Collective. One failure for all ranks, nullopt when nobody failed: the lowest rank's, but what is not an I/O error
/// first. On several ranks the message begins with "rank r: ".
std::optional<Failure> agree(const parallel::Communicator& world, const std::optional<Failure>& mine);

/// Collective. Throws that failure as a collective Error.
void throw_agreed(const parallel::Communicator& world, const std::optional<Failure>& mine);

/// Collective. `function` runs on rank 0; its failure is everybody's.
template <class Function>
std::optional<Failure> on_root(const parallel::Communicator& world, Function&& function) {
  std::optional<Failure> mine;
  if (world.rank() == 0) mine = attempt(function);
  std::int64_t code = mine ? static_cast<std::int64_t>(mine->code) : 0;
  world.broadcast(&code, sizeof code);
  if (code == 0) return std::nullopt;
  return Failure{static_cast<ExitCode>(code), world.broadcast(mine ? std::move(mine->message) : std::string())};
}

}  // namespace weft::checkpoint

// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agreement.hpp"

#include <algorithm>
#include <system_error>
#include <vector>

namespace weft::checkpoint {

Failure current_failure() {
  try {
    throw;
  } catch (const Error& failure) {
    return {failure.code(), failure.what()};
  } catch (const std::system_error& failure) {  // std::filesystem
    return {ExitCode::io, failure.what()};
  } catch (const std::exception& failure) {
    return {ExitCode::internal, failure.what()};
  }
}

std::optional<Failure> agree(const parallel::Communicator& world, const std::optional<Failure>& mine) {
  const std::int64_t code = mine ? static_cast<std::int64_t>(mine->code) : 0;
  std::vector<std::int64_t> codes(static_cast<std::size_t>(world.size()));
  world.all_gather(&code, codes.data(), sizeof code);
  constexpr auto kIo = static_cast<std::int64_t>(ExitCode::io);
  auto at = std::find_if(codes.begin(), codes.end(), [](std::int64_t c) { return c != 0 && c != kIo; });
  if (at == codes.end()) at = std::find(codes.begin(), codes.end(), kIo);
  if (at == codes.end()) return std::nullopt;
  const int rank = static_cast<int>(at - codes.begin());
  std::string message = world.broadcast(mine ? mine->message : std::string(), rank);
  if (world.size() > 1) message = fmt::format("rank {}: {}", rank, message);
  return Failure{static_cast<ExitCode>(*at), std::move(message)};
}

void throw_agreed(const parallel::Communicator& world, const std::optional<Failure>& mine) {
  if (const auto failure = agree(world, mine)) throw Error(failure->code, failure->message, KnownTo::all_ranks);
}

}  // namespace weft::checkpoint

// SPDX-License-Identifier: Apache-2.0
#include "storage/ownership.hpp"

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "parallel/failure.hpp"

namespace weft::storage {
namespace {

std::function<std::string()> lost_because;

}  // namespace

void set_ownership(std::function<std::string()> lost) { lost_because = std::move(lost); }

bool owns_run_directory() noexcept {
  try {
    return !lost_because || lost_because().empty();
  } catch (const std::exception&) {
    return false;
  }
}

void require_ownership() {
  if (!lost_because) return;
  const std::string why = lost_because();
  if (why.empty()) return;
  // Several threads may detect the loss at the same time: one logs it and ends the job, the others wait.
  static std::atomic_flag ending;
  while (ending.test_and_set()) std::this_thread::sleep_for(std::chrono::seconds(1));
  parallel::end_job(ExitCode::io, why);
}

}  // namespace weft::storage

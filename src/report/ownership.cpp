// SPDX-License-Identifier: Apache-2.0
#include "report/ownership.hpp"

#include <exception>

#include "parallel/failure.hpp"

namespace weft::report {
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
  if (const std::string why = lost_because(); !why.empty()) parallel::end_job(ExitCode::io, why);
}

}  // namespace weft::report

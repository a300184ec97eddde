// SPDX-License-Identifier: Apache-2.0
#include "privacy/accountant/accountant.hpp"

#include <cmath>

#include "base/error.hpp"
#include "privacy/accountant/checks.hpp"

namespace weft::privacy {

double gdp_epsilon(History history, double delta) {
  const double full = full_batch_mu(history);
  double square = full * full;  // exact
  for (const Phase& phase : history) {
    const double q = phase.sample_rate, sigma = phase.noise_multiplier;
    if (phase.steps > 0 && q > 0 && q < 1)
      square += q * q * static_cast<double>(phase.steps) * std::expm1(1 / (sigma * sigma));
  }
  return gaussian_epsilon(std::sqrt(square), delta);
}

double epsilon(AccountantKind kind, History history, double delta) {
  const double found = kind == AccountantKind::prv   ? prv_epsilon(history, delta).upper
                       : kind == AccountantKind::pld ? pld_epsilon(history, delta)
                       : kind == AccountantKind::rdp ? rdp_epsilon(history, delta, rdp_orders()).epsilon
                                                     : gdp_epsilon(history, delta);
  if (!std::isfinite(found))
    throw error(ExitCode::usage,
                "the accountant {} has no finite epsilon for {} steps with so little noise; take a larger noise "
                "multiplier",
                name_of(kind), steps_of(history));
  return found;
}

std::string_view name_of(AccountantKind kind) {
  switch (kind) {
    case AccountantKind::prv:
      return "prv";
    case AccountantKind::pld:
      return "pld";
    case AccountantKind::rdp:
      return "rdp";
    case AccountantKind::gdp:
      return "gdp";
  }
  return "";
}

}  // namespace weft::privacy

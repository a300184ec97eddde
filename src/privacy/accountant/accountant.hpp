// SPDX-License-Identifier: Apache-2.0
//
// The guarantee of a private run: epsilon at a given delta of a composition of steps.
//
// A step is the Poisson-subsampled Gaussian mechanism: each record joins with probability q, the sum of contributions
// of norm at most C gets noise of standard deviation sigma C. Neighbouring data differ by one record that is added or
// removed. Four accountants:
//
//   rdp  Rényi differential privacy: an upper bound (Mironov, Talwar, Zhang 2019, arXiv:1908.10530)
//   prv  the distribution of the privacy loss, composed by FFT, with bounds of its errors: tight (Gopi, Lee,
//        Wutschitz 2021, arXiv:2106.02848)
//   pld  the same distribution, bounded from above on a grid: tight (Doroshenko et al. 2022, arXiv:2207.04380)
//   gdp  central limit of many steps: an approximation, no bound (Bu, Dong, Long, Su 2020, arXiv:1911.11607)
//
// Functions throw Error(usage) if an accountant has no result, with the reason, and Error(internal) if a result
// contradicts what is known without an accountant (checks.hpp): nothing that is not a number becomes a guarantee.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "privacy/accountant/history.hpp"

namespace weft::privacy {

/// The accountants above.
enum class AccountantKind { prv, pld, rdp, gdp };
inline constexpr AccountantKind kAccountants[] = {AccountantKind::prv, AccountantKind::pld, AccountantKind::rdp,
                                                  AccountantKind::gdp};

/// Epsilon at `delta` in (0, 1). It is 0 for no steps.
double epsilon(AccountantKind, History, double delta);

struct RdpEpsilon {
  double epsilon = 0;
  double order = 0;  ///< with which it was found; 0 without steps
};
/// The orders that are tried: 1.1, 1.2, …, 10.9, 12, 13, …, 63, 64, 128, …, 16384; the last ones are for little
/// epsilon.
const std::vector<double>& rdp_orders();
RdpEpsilon rdp_epsilon(History, double delta, std::span<const double> orders);
/// Rényi divergence of one step at this order, more than 1; infinite if it exceeds the range of fp64.
double rdp_of_step(double sample_rate, double noise_multiplier, double order);

struct PrvEpsilon {
  double lower = 0, estimate = 0, upper = 0;  ///< the true value is between lower and upper
};
/// Errors of epsilon and, relative to delta, of delta that prv allows for. That of epsilon is a hundredth of it below
/// 1, and a thousandth above 10, where kPrvEpsilonError would take more than seconds. The upper bound is never above
/// that of rdp.
constexpr double kPrvEpsilonError = 0.01, kPrvDeltaError = 1e-3;
PrvEpsilon prv_epsilon(History, double delta);
/// Estimate of epsilon for searches: no bound of its error, computed in tenths of a second.
double prv_estimate(History, double delta);

/// Epsilon by the accountant pld, an upper bound; never above that of rdp.
double pld_epsilon(History, double delta);

/// Epsilon by the Gaussian approximation. Exact at a sample rate of 1.
double gdp_epsilon(History, double delta);

/// A noise multiplier with which `steps` steps at `sample_rate` after `before` give at most `target`, and less by at
/// most 1 % of it or 0.01 if that is less. Throws Error(usage) if there is none, with the reason. The work is bounded.
double calibrate(AccountantKind, double target, double delta, double sample_rate, std::int64_t steps,
                 History before = {});

/// Truncated Poisson sampling: a step that draws more than `most` of the `records` takes a random choice of so many.
struct Truncation {
  std::int64_t records = 0;  ///< of the training data
  std::int64_t most = 0;     ///< of a step; 0: not truncated
};
/// The same with truncation, for which a thousandth of delta is left. Throw Error(usage), with the batch that suffices,
/// if it needs more.
double epsilon(AccountantKind, History, double delta, const Truncation&);
double calibrate(AccountantKind, double target, double delta, double sample_rate, std::int64_t steps, History before,
                 const Truncation&);
/// An upper bound of ln Pr[Bin(n, q) > most], a few percent of the probability above it in the far tail.
double log_binomial_tail(std::int64_t n, double q, std::int64_t most);

std::string_view name_of(AccountantKind);

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
//
// What every accountant's result is compared with: values that are known without an accountant.
#pragma once

#include <string_view>

#include "privacy/accountant/history.hpp"

namespace weft::privacy {

/// ln erfc(x). Beyond 25, where erfc approaches the smallest numbers, its asymptotic series: relative error below 1e-9
/// of erfc there.
double log_erfc(double x);

/// Epsilon of the Gaussian mechanism of sensitivity mu and noise 1, exactly (Balle and Wang 2018, arXiv:1805.06530).
double gaussian_epsilon(double mu, double delta);

/// mu of the steps with a sample rate of 1: n steps with noise sigma are one with sigma / sqrt(n).
double full_batch_mu(History);

/// True if every step that counts has a sample rate of 1: gaussian_epsilon(full_batch_mu) is then exact.
bool is_full_batch(History);

/// A lower bound of epsilon, of an observer who looks at the largest output only: delta(epsilon) is at least
/// P(E) - e^epsilon Q(E) for every event E, here "an output exceeds x". With full batches also their exact epsilon.
double least_epsilon(History, double delta);

/// Throws Error(internal), with the name of the accountant, if `found` is not a number, or less than the least possible
/// epsilon. A guarantee that is false is worse than none.
void require_bound(std::string_view accountant, double found, History, double delta);

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
//
// How delta is divided where batches are truncated.
#pragma once

#include "privacy/accountant/accountant.hpp"

namespace weft::privacy {

/// The delta of the steps, without what is left for truncation.
double delta_of_steps(const Truncation&, double delta);

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
//
// The softmax of a row from the parts of the ranks, in their order: one rule for the portable and the CUDA kernel.
#pragma once

#include "kernels/language/exponential.hpp"
#include "kernels/language/head/cross_entropy.hpp"

namespace weft::kernels {

/// Part of all columns of a row, joined from the parts of ranks.
WEFT_HOST_DEVICE inline SoftmaxPart joined_parts(Array<const SoftmaxPart> parts, std::int64_t row, std::int64_t rows) {
  SoftmaxPart all{parts[row].largest, 0.0f, 0.0f};
  for (std::int64_t at = row + rows; at < parts.size; at += rows)
    all.largest = parts[at].largest > all.largest ? parts[at].largest : all.largest;
  for (std::int64_t at = row; at < parts.size; at += rows) {
    all.sum += parts[at].sum * exponential(parts[at].largest - all.largest);
    all.target_logit += parts[at].target_logit;
  }
  return all;
}

}  // namespace weft::kernels

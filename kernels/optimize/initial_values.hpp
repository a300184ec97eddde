// SPDX-License-Identifier: Apache-2.0
//
// Initial values of parameters. A value depends on the seed, the purpose and its global index alone.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/random.hpp"

namespace weft::kernels {

struct Initial {
  enum class Kind { constant, uniform, normal } kind = Kind::constant;
  double value = 0;      ///< the constant; bound of the uniform values in [-value, value]; standard deviation
  Purpose purpose = {};  ///< stream of random numbers
};

/// out[i] = the initial value of global element first_element + i. Normal values are computed in fp64 with log and cos
/// of the processor or GPU: rounded to fp32 they agree but for rare last bits.
void initial_values(const Execution&, const Initial&, std::uint64_t seed, std::uint64_t first_element,
                    Array<float> out);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/convert/convert.hpp"

namespace weft::kernels::cuda {

void normalise_rows(const Execution&, AnyMatrix raw, Array<const float> mean, Array<const float> scale, AnyMatrix out,
                    std::int32_t* flag);

void copy_rows(const Execution&, AnyMatrix in, AnyMatrix out);

}  // namespace weft::kernels::cuda

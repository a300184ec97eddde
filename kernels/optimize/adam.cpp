// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in adam_portable.cpp and adam_cuda.cu.
#include "kernels/optimize/adam.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::adam_rows) adam_rows;
decltype(kernels::adam_vector) adam_vector;
decltype(kernels::initialise_uniform) initialise_uniform;
decltype(kernels::weights_to_float) weights_to_float;
decltype(kernels::weights_from_float) weights_from_float;
decltype(kernels::flag_nonfinite) flag_nonfinite;
decltype(kernels::flag_beyond) flag_beyond;
}  // namespace portable

namespace cuda {
decltype(kernels::adam_rows) adam_rows;
decltype(kernels::adam_vector) adam_vector;
decltype(kernels::initialise_uniform) initialise_uniform;
decltype(kernels::weights_to_float) weights_to_float;
decltype(kernels::weights_from_float) weights_from_float;
decltype(kernels::flag_nonfinite) flag_nonfinite;
decltype(kernels::flag_beyond) flag_beyond;
}  // namespace cuda

void adam_rows(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
               Matrix<const float> gradient, const AdamStep* step) {
  dispatch<portable::adam_rows, cuda::adam_rows>(execution, parameters, row_begin, gradient, step);
}

void adam_vector(const Execution& execution, const ParameterVector& parameters, Array<const float> gradient,
                 const AdamStep* step) {
  dispatch<portable::adam_vector, cuda::adam_vector>(execution, parameters, gradient, step);
}

void initialise_uniform(const Execution& execution, const ParameterRows& parameters, float bound, std::uint64_t seed,
                        Purpose purpose) {
  dispatch<portable::initialise_uniform, cuda::initialise_uniform>(execution, parameters, bound, seed, purpose);
}

void weights_to_float(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
                      Matrix<float> out) {
  dispatch<portable::weights_to_float, cuda::weights_to_float>(execution, parameters, row_begin, out);
}

void weights_from_float(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
                        Matrix<const float> in) {
  dispatch<portable::weights_from_float, cuda::weights_from_float>(execution, parameters, row_begin, in);
}

void flag_nonfinite(const Execution& execution, const ParameterRows& parameters, std::int32_t* flag) {
  dispatch<portable::flag_nonfinite, cuda::flag_nonfinite>(execution, parameters, flag);
}

void flag_beyond(const Execution& execution, AnyMatrix matrix, float largest, std::int32_t* flag) {
  dispatch<portable::flag_beyond, cuda::flag_beyond>(execution, matrix, largest, flag);
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in example_sums_portable.cpp and example_sums_cuda.cu.
#include "kernels/privacy/example_sums.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::add_parts) add_parts;
decltype(kernels::add_squares) add_squares;
decltype(kernels::add_weighed) add_weighed;
decltype(kernels::add_inner_products) add_inner_products;
decltype(kernels::sum_example_columns) sum_example_columns;
}  // namespace portable

namespace cuda {
decltype(kernels::add_parts) add_parts;
decltype(kernels::add_squares) add_squares;
decltype(kernels::add_weighed) add_weighed;
decltype(kernels::add_inner_products) add_inner_products;
decltype(kernels::sum_example_columns) sum_example_columns;
}  // namespace cuda

void add_parts(const Execution& execution, std::int64_t n_parts, double weight, Array<double> norms,
               Array<const double> parts) {
  dispatch<portable::add_parts, cuda::add_parts>(execution, n_parts, weight, norms, parts);
}

void add_squares(const Execution& execution, AnyMatrix values, Array<double> norms, Array<double> parts) {
  dispatch<portable::add_squares, cuda::add_squares>(execution, values, norms, parts);
}

void add_weighed(const Execution& execution, AnyMatrix values, Array<const float> factors, Matrix<float> out) {
  dispatch<portable::add_weighed, cuda::add_weighed>(execution, values, factors, out);
}

void add_inner_products(const Execution& execution, Matrix<const float> a, Matrix<const float> b, double weight,
                        double error, Array<double> norms, Array<double> parts) {
  dispatch<portable::add_inner_products, cuda::add_inner_products>(execution, a, b, weight, error, norms, parts);
}

void sum_example_columns(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<const std::int64_t> offsets, Matrix<float> sums) {
  dispatch<portable::sum_example_columns, cuda::sum_example_columns>(execution, x, g, shift, scale, offsets, sums);
}

}  // namespace weft::kernels

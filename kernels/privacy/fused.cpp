// SPDX-License-Identifier: Apache-2.0
//
// Connects fused_cuda.cu. There is no portable implementation: the dense library's path (products.hpp) is that.
#include "kernels/privacy/fused.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {

bool form_fused_norms(const Execution&, AnyMatrix, AnyMatrix, const Examples&, std::int64_t, Array<double>,
                      Array<double>) {
  return false;
}
bool form_fused_gram(const Execution&, AnyMatrix, AnyMatrix, const Examples&, std::int64_t, double, Array<double>,
                     Array<double>) {
  return false;
}
bool add_fused_product(const Execution&, AnyMatrix, AnyMatrix, const Examples&, Array<const float>, Matrix<float>,
                       Array<float>) {
  return false;
}

}  // namespace portable

namespace cuda {
decltype(kernels::form_fused_norms) form_fused_norms;
decltype(kernels::form_fused_gram) form_fused_gram;
decltype(kernels::add_fused_product) add_fused_product;
}  // namespace cuda

bool form_fused_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                      std::int64_t least, Array<double> norms, Array<double> parts) {
  return dispatch<portable::form_fused_norms, cuda::form_fused_norms>(execution, x, g, examples, least, norms, parts);
}

bool form_fused_gram(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples, std::int64_t least,
                     double error, Array<double> norms, Array<double> parts) {
  return dispatch<portable::form_fused_gram, cuda::form_fused_gram>(execution, x, g, examples, least, error, norms,
                                                                    parts);
}

bool add_fused_product(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                       Array<const float> factors, Matrix<float> out, Array<float> sums) {
  return dispatch<portable::add_fused_product, cuda::add_fused_product>(execution, x, g, examples, factors, out, sums);
}

}  // namespace weft::kernels

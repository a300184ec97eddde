// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/activation/coded_activation.hpp"

namespace weft::kernels::portable {

void code_activation(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix y,
                     const Coding& coding) {
  mlp_activation(execution, activation, x, y);
  code_matrix(execution, y, coding);
}

void code_activation_backward(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix dy,
                              AnyMatrix dx, const Coding& coding) {
  mlp_activation_backward(execution, activation, x, dy, dx);
  code_matrix(execution, dx, coding);
}

}  // namespace weft::kernels::portable

// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/activation/activation.hpp"

namespace weft::kernels::portable {

void activation_backward(const Execution& execution, const ActivationFunction& function,
                         const SparseActivations& activations, Array<const float> activation_gradient,
                         const ActivationGradients& gradients) {
  const ActivationFunction f = function;
  const SparseActivations a = activations;
  const Array<float> dz = gradients.preactivation;
  for_all(
      execution, "activation_backward", a.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i < a.row_offsets[a.n_tokens])
          dz[i] = preactivation_gradient(f, a.key[i], a.value[i], activation_gradient[i]);
      });
}

}  // namespace weft::kernels::portable

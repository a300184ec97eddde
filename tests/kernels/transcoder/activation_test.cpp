// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/activation/activation.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("activation_backward multiplies by the derivative: 1 on every entry of relu, topk, batch_topk and jumprelu") {
  for_each_backend([&](const Execution& execution) {
    for (const Activation kind : {Activation::batch_topk, Activation::topk, Activation::relu, Activation::jumprelu}) {
      CHECK(activation_passes_gradient(kind));
      const Sparse sparse = random_sparse(300, 2, 30, 0.1, 1);
      const std::vector<float> gradient = random_floats(sparse.capacity(), 2);
      const DeviceArray<float> da(gradient), dz(std::vector<float>(sparse.capacity(), -7.0f));
      activation_backward(execution, {kind}, sparse.csr(), da.array(), {dz.array()});
      const std::vector<float> result = dz.values();
      // Positions beyond the entries in use are not written.
      for (std::int64_t i = 0; i < sparse.capacity(); ++i)
        REQUIRE(result[i] == (i < sparse.size() ? gradient[i] : -7.0f));
      activation_backward(execution, {kind}, sparse.csr(), da.array(), {da.array()});
      CHECK(da.values() == gradient);
    }
  });
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
#include "parallel/exchange_observer.hpp"

#include "kernels/kokkos_runtime.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

void IsolateExchange::before(const kernels::Execution& execution, const Communicator& ranks) const {
  kernels::fence(execution);
  ranks.barrier();
}
void IsolateExchange::after(const kernels::Execution& execution) const { kernels::fence(execution); }

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/benchmark/exchange_observers.hpp"

#include "kernels/runtime.hpp"
#include "parallel/communicator.hpp"

namespace weft::transcoder {

void WaitAfterExchange::after(const kernels::Execution& execution) const { kernels::fence(execution); }

void IsolateExchange::before(const kernels::Execution& execution, const parallel::Communicator& ranks) const {
  kernels::fence(execution);
  ranks.barrier();
}
void IsolateExchange::after(const kernels::Execution& execution) const { kernels::fence(execution); }

parallel::ExchangeStrategy exchange_strategy(const ExchangeSettings& exchange) {
  static const WaitAfterExchange wait;
  parallel::ExchangeStrategy strategy = exchange.strategy;
  if (exchange.wait) strategy.observer = &wait;
  return strategy;
}

}  // namespace weft::transcoder

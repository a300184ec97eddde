// SPDX-License-Identifier: Apache-2.0
//
// Observers of exchanges: the baseline in which the host waits (parallel.wait), and the timing of a step phase by
// phase. Neither changes a result.
#pragma once

#include "parallel/exchange_observer.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

/// parallel.wait: the host waits after each exchange until it is done.
class WaitAfterExchange : public parallel::ExchangeObserver {
 public:
  void before(const kernels::Execution&, const parallel::Communicator&) const override {}
  void after(const kernels::Execution&) const override;
  bool isolates() const override { return false; }
};

/// Before an exchange the host waits for the GPU and then for the other ranks, and after it for the GPU: the time
/// between is that of the exchange itself.
class IsolateExchange : public parallel::ExchangeObserver {
 public:
  void before(const kernels::Execution&, const parallel::Communicator&) const override;
  void after(const kernels::Execution&) const override;
  bool isolates() const override { return true; }
};

/// How the exchanges of a step are made: memory, and the observer that `parallel.wait` asks for.
parallel::ExchangeStrategy exchange_strategy(const ExchangeSettings&);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Actions before and after every exchange of a DeviceCommunicator. Training has no observer;
// where a step is timed phase by phase, or compared with a baseline (bench/), there is one.
#pragma once

#include "kernels/execution.hpp"

namespace weft::parallel {

class Communicator;

class ExchangeObserver {
 public:
  virtual ~ExchangeObserver() = default;
  /// Before an exchange of `ranks` on the stream of `execution`. Collective where the implementation says so.
  virtual void before(const kernels::Execution& execution, const Communicator& ranks) const = 0;
  /// After the call that started it.
  virtual void after(const kernels::Execution& execution) const = 0;
  /// True if the exchange alone lies between `before` and `after`, so that the host can time it on GPUs too.
  virtual bool isolates() const = 0;
};

/// Before an exchange the host waits for the GPU and then for the other ranks, and after it for the GPU: the time
/// between is that of the exchange itself.
class IsolateExchange final : public ExchangeObserver {
 public:
  void before(const kernels::Execution&, const Communicator&) const override;
  void after(const kernels::Execution&) const override;
  bool isolates() const override { return true; }
};

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
//
// Memory that ranks exchange, where the kernels run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "parallel/communicator.hpp"
#include "parallel/exchange_observer.hpp"

namespace weft::parallel {

/// How ranks exchange, where there is a choice.
struct ExchangeStrategy {
  bool direct = true;        ///< GPUs that reach one another's memory write there themselves; false: through NCCL
  bool keep_buffers = true;  ///< memory of exchanges stays allocated; false: allocated for each use
  const ExchangeObserver* observer = nullptr;  ///< null: none; must outlive what is made with it

  /// Of memory that stays allocated in any case.
  ExchangeStrategy kept() const { return {direct && keep_buffers, true, observer}; }
  /// True if GPUs of these ranks write into one another's ExchangeBuffers. Collective on first use.
  bool is_direct(const Communicator& ranks) const { return direct && keep_buffers && ranks.peers() != nullptr; }
};

/// Memory that an axis of ranks exchanges: between GPUs known to the other ranks, or to NCCL. `keep_buffers` selects
/// the implementation at construction: memory for the life of the object, or plain memory between `open` and `close`.
class ExchangeBuffer {
 public:
  ExchangeBuffer();
  /// As many bytes on every rank. Collective.
  ExchangeBuffer(const Communicator& ranks, std::int64_t bytes, ExchangeStrategy strategy = {});
  ExchangeBuffer(ExchangeBuffer&&) noexcept;
  ExchangeBuffer& operator=(ExchangeBuffer&&) noexcept;
  ~ExchangeBuffer();

  /// Before the first use in a step; returns `data`.
  std::byte* open();
  /// After the last use.
  void close();
  /// Null where there are no bytes, or outside `open` and `close` of memory that is not kept.
  std::byte* data() const;

  class Memory;

 private:
  std::unique_ptr<Memory> memory_;
};

}  // namespace weft::parallel

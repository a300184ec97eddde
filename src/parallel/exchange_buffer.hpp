// SPDX-License-Identifier: Apache-2.0
//
// Memory that ranks exchange, where the kernels run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "parallel/communicator.hpp"
#include "parallel/exchange_observer.hpp"
#include "parallel/gpu_groups.hpp"

namespace weft::parallel {

class ExchangeMemory;

/// How ranks exchange, where there is a choice. The defaults are those of training; others have the same result bit for
/// bit.
struct ExchangeStrategy {
  bool direct = true;  ///< GPUs that reach one another's memory write there themselves; false: through NCCL
  const ExchangeMemory* memory = nullptr;      ///< where other memory than ExchangeBuffer's own is measured
  const ExchangeObserver* observer = nullptr;  ///< null: none; must outlive what is made with it, like `memory`

  /// This strategy, with memory that stays allocated.
  ExchangeStrategy kept() const { return {direct && memory == nullptr, nullptr, observer}; }
  /// True if GPUs of these ranks write into one another's ExchangeBuffers. Collective on first use.
  bool is_direct(const Communicator& ranks) const { return direct && memory == nullptr && peers_of(ranks) != nullptr; }
  /// True if a step never waits for the host: then it can be captured in a graph.
  bool leaves_the_host_free() const { return memory == nullptr && observer == nullptr; }
};

/// Memory that an axis of ranks exchanges: between GPUs known to the other ranks, or to NCCL. It stays allocated for
/// the life of the object, unless ExchangeStrategy::memory replaces it.
class ExchangeBuffer {
 public:
  /// The implementation; this one has no memory. One that keeps its memory has nothing to open or close.
  class Memory {
   public:
    Memory() = default;
    Memory(const Memory&) = delete;
    virtual ~Memory() = default;
    virtual void open() {}
    virtual void close() {}
    std::byte* data() const { return data_; }

   protected:
    explicit Memory(void* data) : data_(static_cast<std::byte*>(data)) {}
    std::byte* data_ = nullptr;
  };

  ExchangeBuffer();
  /// Allocates `bytes`, the same number on every rank. Collective.
  ExchangeBuffer(const Communicator& ranks, std::int64_t bytes, ExchangeStrategy strategy = {});
  ExchangeBuffer(ExchangeBuffer&&) noexcept;
  ExchangeBuffer& operator=(ExchangeBuffer&&) noexcept;
  ~ExchangeBuffer();

  /// Called before the first use in a step; returns `data`.
  std::byte* open();
  /// Called after the last use in a step.
  void close();
  /// The memory; null if it has no bytes, or outside `open` and `close` of memory that is not kept.
  std::byte* data() const;

 private:
  std::unique_ptr<Memory> memory_;
};

/// Makes the memory of ExchangeBuffers.
class ExchangeMemory {
 public:
  virtual ~ExchangeMemory() = default;
  virtual std::unique_ptr<ExchangeBuffer::Memory> make(std::int64_t bytes) const = 0;
};

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
#include "parallel/exchange_buffer.hpp"

#include "device/memory.hpp"
#include "parallel/nccl.hpp"
#include "parallel/peers.hpp"

namespace weft::parallel {

namespace {

/// Memory that is registered with a library or mapped by the peers, or plain memory: any type with `data()`.
template <class Block>
class Kept : public ExchangeBuffer::Memory {
 public:
  template <class... Arguments>
  explicit Kept(Arguments&&... arguments) : block_(std::forward<Arguments>(arguments)...) {
    data_ = static_cast<std::byte*>(block_.data());
  }

 private:
  const Block block_;
};

std::unique_ptr<ExchangeBuffer::Memory> memory_for(const Communicator& ranks, std::int64_t bytes,
                                                   const ExchangeStrategy& strategy) {
  if (strategy.memory != nullptr) return strategy.memory->make(bytes);
  if (bytes == 0) return std::make_unique<ExchangeBuffer::Memory>();
  if (strategy.is_direct(ranks)) return std::make_unique<Kept<Peers::Memory>>(*peers_of(ranks), bytes);
  if (nccl::Group* const gpus = gpus_of(ranks); gpus != nullptr)
    return std::make_unique<Kept<nccl::Memory>>(*gpus, bytes);
  return std::make_unique<Kept<device::Buffer<std::byte>>>(bytes);
}

}  // namespace

ExchangeBuffer::ExchangeBuffer() : memory_(std::make_unique<Memory>()) {}
ExchangeBuffer::ExchangeBuffer(const Communicator& ranks, std::int64_t bytes, ExchangeStrategy strategy)
    : memory_(memory_for(ranks, bytes, strategy)) {}
ExchangeBuffer::ExchangeBuffer(ExchangeBuffer&&) noexcept = default;
ExchangeBuffer& ExchangeBuffer::operator=(ExchangeBuffer&&) noexcept = default;
ExchangeBuffer::~ExchangeBuffer() = default;

std::byte* ExchangeBuffer::open() {
  memory_->open();
  return data();
}
void ExchangeBuffer::close() { memory_->close(); }
std::byte* ExchangeBuffer::data() const { return memory_->data(); }

}  // namespace weft::parallel

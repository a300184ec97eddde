// SPDX-License-Identifier: Apache-2.0
//
// Runs the code of a GPU block on the host, one fiber per thread, with the lane layouts of the PTX manual for
// ldmatrix.x4 and mma.m16n8k16. A fiber runs until it meets the other lanes of its warp (matrix instructions,
// shuffles), a warp until it meets the others (sync). Copies to shared memory take place only when they are waited for,
// and shared memory starts as NaN: a missing wait or barrier shows as a wrong result.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/bf16.hpp"

namespace weft::testing {

class EmulatedBlock;

/// What a thread of a block sees (kernels/language/attention/flash.hpp).
struct EmulatedContext {
  using Number = kernels::bf16;
  EmulatedBlock* block;
  int thread;
  unsigned char* shared;

  void sync();
  void sync_warp();
  void copy16(std::uint32_t to, const void* from, bool valid) { copy(to, from, valid ? 16 : 0, 16); }
  void copy4(std::uint32_t to, const void* from, bool valid) { copy(to, from, valid ? 4 : 0, 4); }
  void commit();
  template <int pending>
  void wait() {
    wait_for(pending);
  }
  void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) { load(r, address, false); }
  void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) { load(r, address, true); }
  void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    multiply_as<kernels::bf16>(c, a, b0, b1);
  }
  template <class T>
  T shuffle_xor(T value, int mask) {
    static_assert(sizeof(T) == 4);
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = shuffle(bits, mask);
    std::memcpy(&value, &bits, 4);
    return value;
  }
  float exp2(float x) const { return std::exp2(x); }

 protected:
  template <class T>
  void multiply_as(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

 private:
  std::uint32_t* words(int of) const;  ///< of a thread of this warp, in the operation that comes next
  void copy(std::uint32_t to, const void* from, int bytes, int size);
  void wait_for(int pending);
  void load(std::uint32_t (&r)[4], std::uint32_t address, bool transposed);
  std::uint32_t shuffle(std::uint32_t bits, int mask);
};

/// The same with fp16 operands.
struct EmulatedHalfContext : EmulatedContext {
  using Number = kernels::half;
  explicit EmulatedHalfContext(const EmulatedContext& context) : EmulatedContext(context) {}
  void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    multiply_as<kernels::half>(c, a, b0, b1);
  }
};

class EmulatedBlock {
 public:
  /// Runs body(context) as `threads` threads with `shared` bytes of shared memory. The last warp runs first if
  /// `reversed`.
  EmulatedBlock(int threads, std::int64_t shared, bool reversed, const std::function<void(EmulatedContext&)>& body)
      : fibers_(threads), shared_(shared + 16, 0xff), size_(static_cast<std::uint32_t>(shared)) {
    for (int i = 0; i < threads; ++i) prepare(i);
    body_ = &body;
    // A warp runs as far as it can before the next one.
    const int warps = threads / 32;
    for (int done = 0; done < threads;) {
      bool progress = false;
      for (int k = 0; k < warps; ++k)
        for (bool again = true; again;) {
          again = false;
          const int first = (reversed ? warps - 1 - k : k) * 32;
          for (int i = first; i < first + 32; ++i) {
            if (fibers_[i].done || !ready(i)) continue;
            progress = again = true;
            swapcontext(&scheduler_, &fibers_[i].state);
            if (error_) std::rethrow_exception(error_);
            if (fibers_[i].done) ++done;
          }
        }
      if (!progress) throw std::runtime_error("emulated block: the threads wait for each other");
    }
  }

 private:
  friend struct EmulatedContext;
  static constexpr std::size_t kStack = 256 * 1024;
  struct Copy {
    std::uint32_t to;
    int bytes, size;
    const void* from;
  };
  struct Fiber {
    ucontext_t state;
    std::unique_ptr<char[]> stack;
    EmulatedContext context{};
    bool done = false;
    long warp_arrivals = 0, block_arrivals = 0;  // barriers reached
    bool waits_for_block = false;
    // Given to the other lanes: an address, a value, or a[4], b[2] of a product. Two sets in turn, so that one barrier
    // separates writing from reading and the next operation does not overwrite what is still read.
    std::uint32_t words[2][6] = {};
    std::deque<std::vector<Copy>> copies;  // committed groups, and at the back the open one
  };

  void prepare(int i) {
    Fiber& fiber = fibers_[i];
    void* base = shared_.data();
    std::size_t space = shared_.size();
    fiber.context = {this, i, static_cast<unsigned char*>(std::align(16, size_, base, space))};
    fiber.stack.reset(new char[kStack]);  // not initialised: few of its pages are used
    getcontext(&fiber.state);
    fiber.state.uc_stack.ss_sp = fiber.stack.get();
    fiber.state.uc_stack.ss_size = kStack;
    fiber.state.uc_link = &scheduler_;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&fiber.state, reinterpret_cast<void (*)()>(&EmulatedBlock::start), 3, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self), i);
  }
  static void start(unsigned high, unsigned low, int i) {
    auto* self = reinterpret_cast<EmulatedBlock*>(static_cast<std::uintptr_t>(high) << 32 | low);
    Fiber& fiber = self->fibers_[i];
    fiber.copies.emplace_back();
    try {
      (*self->body_)(fiber.context);
    } catch (...) {
      self->error_ = std::current_exception();
    }
    fiber.done = true;
  }
  /// True if all that thread i waits for have arrived.
  bool ready(int i) const {
    const Fiber& fiber = fibers_[i];
    return fiber.waits_for_block ? block_arrivals_ >= fiber.block_arrivals * std::ssize(fibers_)
                                 : warp_arrivals_[i / 32] >= fiber.warp_arrivals * 32;
  }
  void arrive(int i, bool block) {
    Fiber& fiber = fibers_[i];
    ++(block ? fiber.block_arrivals : fiber.warp_arrivals);
    ++(block ? block_arrivals_ : warp_arrivals_[i / 32]);
    fiber.waits_for_block = block;
    swapcontext(&fiber.state, &scheduler_);
  }

  std::uint32_t* words(int i, int of) { return fibers_[of].words[fibers_[i].warp_arrivals % 2]; }

  std::vector<Fiber> fibers_;
  std::vector<long> warp_arrivals_ = std::vector<long>(fibers_.size() / 32);
  long block_arrivals_ = 0;
  std::vector<unsigned char> shared_;
  std::uint32_t size_;
  ucontext_t scheduler_{};
  std::exception_ptr error_;
  const std::function<void(EmulatedContext&)>* body_ = nullptr;
};

inline std::uint32_t* EmulatedContext::words(int of) const { return block->words(thread, of); }
inline void EmulatedContext::sync() { block->arrive(thread, true); }
inline void EmulatedContext::sync_warp() { block->arrive(thread, false); }

inline void EmulatedContext::copy(std::uint32_t to, const void* from, int bytes, int size) {
  if (to % size != 0 || reinterpret_cast<std::uintptr_t>(from) % size != 0 || to + size > block->size_)
    throw std::runtime_error("emulated block: copy that is not aligned or outside of shared memory");
  std::memset(shared + to, 0xff, size);  // what is there may no longer be read
  block->fibers_[thread].copies.back().push_back({to, bytes, size, from});
}
inline void EmulatedContext::commit() { block->fibers_[thread].copies.emplace_back(); }
inline void EmulatedContext::wait_for(int pending) {
  auto& groups = block->fibers_[thread].copies;
  while (static_cast<int>(groups.size()) - 1 > pending) {
    for (const auto& copy : groups.front()) {
      std::memset(shared + copy.to, 0, copy.size);
      std::memcpy(shared + copy.to, copy.from, copy.bytes);
    }
    groups.pop_front();
  }
}

inline std::uint32_t EmulatedContext::shuffle(std::uint32_t bits, int mask) {
  *words(thread) = bits;
  const std::uint32_t* other = words(thread ^ mask);
  sync_warp();
  return *other;
}

inline void EmulatedContext::load(std::uint32_t (&r)[4], std::uint32_t address, bool transposed) {
  if (address % 16 != 0 || address + 16 > block->size_)
    throw std::runtime_error("emulated block: ldmatrix address is not aligned or outside of shared memory");
  const int lane = thread % 32, first = thread - lane;
  *words(thread) = address;
  const std::uint32_t* addresses[32];
  for (int i = 0; i < 32; ++i) addresses[i] = words(first + i);
  sync_warp();
  // Lane 8 i + j gives the address of row j of matrix i. A lane receives elements (lane / 4, 2 (lane % 4) + {0, 1}) of
  // each matrix, transposed: (2 (lane % 4) + {0, 1}, lane / 4).
  for (int i = 0; i < 4; ++i) {
    std::uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], shared + *addresses[8 * i + row] + 2 * column, 2);
    }
    r[i] = pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
  }
}

template <class T>
void EmulatedContext::multiply_as(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const int lane = thread % 32, first = thread - lane;
  std::uint32_t* own = words(thread);
  for (int i = 0; i < 4; ++i) own[i] = a[i];
  own[4] = b0;
  own[5] = b1;
  const std::uint32_t* operands[32];
  for (int i = 0; i < 32; ++i) operands[i] = words(first + i);
  sync_warp();
  const auto half = [&](int from, int operand, int e) {
    const std::uint32_t word = operands[from][operand];
    return static_cast<float>(T{static_cast<std::uint16_t>(e == 0 ? word & 0xffffu : word >> 16)});
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      // a0: rows 0-7, k 0-7; a1: rows 8-15, k 0-7; a2: rows 0-7, k 8-15; a3: rows 8-15, k 8-15.
      const float x = half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2);
      const float y = half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      c[i] += x * y;
    }
  }
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// Rows of products and lookups that are needed later in the backward pass: copies of those that it writes
// over.
#pragma once

#include <cstdint>
#include <span>

#include "privacy/clipping.hpp"

namespace weft::privacy {

class KeptRows {
 public:
  KeptRows(const kernels::Execution& execution, kernels::Array<std::byte> memory)
      : execution_(execution), memory_(memory) {}

  /// Keeps rows and returns them. Throws Error(internal) if copies do not fit the planned memory.
  model::GradientRows keep(model::GradientRows);
  /// Frees all copies but those of `rows` and the ones before them.
  void free_all_but(std::span<const model::GradientRows> rows);

 private:
  kernels::AnyMatrix copied(const kernels::AnyMatrix&);
  std::int64_t end_of(const kernels::AnyMatrix&) const;

  const kernels::Execution execution_;
  const kernels::Array<std::byte> memory_;
  std::int64_t size_ = 0;  // bytes of all copies
};

/// A pass over all records of a micro-batch. With release = "end" the sink gets products and lookups after the whole
/// pass, from rows that were kept until then.
void pass_over_all(Passes&, const MicroBatch&, model::GradientSink&, Release, KeptRows&);

}  // namespace weft::privacy

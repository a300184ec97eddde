// SPDX-License-Identifier: Apache-2.0
//
// Forward passes whose attention patterns and norm denominators are those of an earlier pass over the same tokens. A
// pattern is a function of queries and keys, after their norm and rotation: these are put back.
#pragma once

#include <vector>

#include "device/memory.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::language_model {

class FrozenPass {
 public:
  /// For passes over up to `rows` rows. settings: of the transformer, which must outlive the object.
  FrozenPass(const TransformerSettings&, std::int64_t rows, Transformer&, const kernels::Execution&);
  FrozenPass(const FrozenPass&) = delete;
  ~FrozenPass() { release(); }

  /// Keeps what the next forward pass forms.
  void record();
  /// The next forward pass, over the tokens of the recorded one, has its patterns and denominators.
  void apply();
  /// Later passes are the model's own.
  void release();

  static std::int64_t bytes(const TransformerSettings&, std::int64_t rows);

 private:
  kernels::AnyMatrix queries_and_keys(std::int64_t layer, std::int64_t rows) const;
  kernels::Array<float> next_inverse(std::int64_t rows);

  const std::int64_t width_, rows_;
  const kernels::Scalar type_;
  Transformer& transformer_;
  const kernels::Execution execution_;
  const device::Buffer<std::byte> queries_and_keys_;  // by layer, [rows, (H + H_kv) d]
  const device::Buffer<float> inverses_;              // by norm in the order of the pass, [rows]
  std::int64_t norms_ = 0;                            // of this pass, so far
};

}  // namespace weft::language_model

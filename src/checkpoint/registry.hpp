// SPDX-License-Identifier: Apache-2.0
//
// The named tensors that make up the state of a run: what a checkpoint holds, in the order of its manifest.
//
// Parameters are registered from their specs (model/parameters.hpp), from which the memory plan and inspection
// derive names, shapes and sizes as well; a model adds its other state (thresholds, norms, counters) itself. The
// registry plans nothing: it exists once memory has been allocated.
//
// A tensor is cut along its first axis only. Every rank registers all tensors, in the same order, with the same type
// and global shape; the ranges differ. Over all ranks the owned ranges cover each row exactly once, for any grid: that
// makes a checkpoint readable on any other number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/array.hpp"
#include "parallel/grid.hpp"

namespace weft::checkpoint {

struct Tensor {
  /// "encoder_0/weight", "encoder_0/weight.first_moment", "decoder_bias", …: see usable_name.
  std::string name;
  kernels::Scalar type = kernels::Scalar::fp32;
  std::vector<std::int64_t> shape;  ///< global; at least one axis
  parallel::Range held;             ///< rows (first axis) that this rank has in memory
  parallel::Range owned;            ///< rows that this rank writes, inside `held`; empty where another rank owns them
  void* data = nullptr;             ///< row held.begin, rows contiguous
  bool on_device = false;           ///< `data` is device memory: accessed with device::copy

  /// Conversion of state that is not stored as plain rows (an fp32 weight kept as two 16-bit planes): copy global rows
  /// [begin, end) to packed host memory and back. Both or none; `data` is then not used.
  std::function<void(parallel::Range rows, void* packed)> gather = {};
  std::function<void(parallel::Range rows, const void* packed)> scatter = {};

  /// Bytes of one row.
  std::int64_t row_bytes() const;
};

class Registry {
 public:
  /// Throws Error(internal) if the name is taken or unusable, or the ranges do not fit the shape.
  void add(Tensor tensor);

  /// A tensor of this name affects speed only: a checkpoint may lack it, have it in another shape, or have it although
  /// this registry does not. It then keeps its content when the checkpoint is loaded.
  void make_optional(std::string name) { optional_.insert(std::move(name)); }
  bool is_optional(const std::string& name) const { return optional_.contains(name); }

  /// Shards with rows of a tensor of this name are files that their owner alone can read.
  void make_secret(std::string name) { secret_.insert(std::move(name)); }
  bool is_secret(const std::string& name) const { return secret_.contains(name); }

  std::span<const Tensor> tensors() const { return tensors_; }
  /// nullptr if there is no tensor of this name.
  const Tensor* find(const std::string& name) const;
  /// Bytes that this rank writes into a checkpoint.
  std::int64_t bytes() const;
  /// Bytes that this rank holds.
  std::int64_t held_bytes() const;

 private:
  std::vector<Tensor> tensors_;
  std::set<std::string> optional_, secret_;
};

/// Letters, digits, '_', '-', '.' and single inner '/', no "..": safe as a path inside a file.
bool usable_name(std::string_view name);

}  // namespace weft::checkpoint

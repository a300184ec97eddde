// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/block_memory.hpp"

#include <utility>

namespace weft::language_model {

using kernels::AnyMatrix;

BlockMemory::BlockMemory(const TransformerSettings& settings, std::int64_t inner_columns, ActivationSwap::Buffers& swap,
                         model::StepArena& arena)
    : settings_(settings), swap_(swap), arena_(arena), inner_columns_(inner_columns) {}

void BlockMemory::begin(std::int64_t block, std::string kind) {
  block_ = block;
  kind_ = std::move(kind);
  next_ = 0;
}

bool BlockMemory::keeps(FormedAgain again) const {
  return settings_.gradients && static_cast<int>(settings_.memory.recompute) < static_cast<int>(again);
}

/// The next array of the sublayer: that of another block with the same memory, or a new one.
kernels::Array<std::byte> BlockMemory::take(const char* purpose, std::int64_t bytes, bool kept) {
  constexpr std::int64_t kShared = -1;
  const std::int64_t set = !kept ? kShared : settings_.swaps() ? block_ % kResidentBlocks : block_;
  const auto [at, is_new] = taken_.try_emplace({set, kind_, next_++});
  if (!is_new) return at->second;
  arena_.purpose(purpose);
  at->second = arena_.take<std::byte>(bytes);
  if (kept && settings_.swaps()) swap_.add(static_cast<std::size_t>(set), at->second);
  return at->second;
}

AnyMatrix BlockMemory::take_matrix(const char* purpose, std::int64_t columns, bool kept) {
  const std::int64_t bytes = settings_.rows * columns * kernels::bytes_of(settings_.type);
  return {take(purpose, bytes, kept).data, settings_.type, settings_.rows, columns, columns};
}

AnyMatrix BlockMemory::matrix(std::int64_t columns, FormedAgain again) {
  return take_matrix("activations", columns, keeps(again));
}

kernels::NormStatistics BlockMemory::statistics() {
  const bool has_mean = settings_.architecture.model.norm == Norm::layer;
  const kernels::Array<float> mean = array<float>(has_mean ? settings_.rows : 0, FormedAgain::block);
  return {mean, array<float>(settings_.rows, FormedAgain::block)};
}

AnyMatrix BlockMemory::gradient(std::int64_t columns) {
  if (!settings_.gradients) return {};
  return take_matrix("backward pass", columns, false);
}

kernels::Array<float> BlockMemory::gradient_numbers(std::int64_t size) {
  if (!settings_.gradients) return {};
  const kernels::Array<std::byte> bytes = take("backward pass", size * bytes_of<float>(), false);
  return {reinterpret_cast<float*>(bytes.data), size};
}

AnyMatrix BlockMemory::inner_gradient(std::int64_t columns) {
  if (!settings_.gradients) return {};
  if (inner_.columns == 0) {
    arena_.purpose("backward pass");
    inner_ = arena_.take_matrix(settings_.type, settings_.rows, inner_columns_);
  }
  return inner_.columns_from(0, columns);
}

kernels::Array<std::byte> BlockMemory::workspace(std::int64_t bytes) { return take("workspaces", bytes, false); }

}  // namespace weft::language_model

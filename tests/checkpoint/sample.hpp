// SPDX-License-Identifier: Apache-2.0
//
// A small state with every kind of tensor a run has, whose bits are a pure function of (step, tensor, element): any
// rank of any grid can say what it must be.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "parallel/communicator.hpp"

namespace weft::checkpoint::testing {

struct Sample {
  Registry registry;
  std::vector<std::vector<unsigned char>> memory;

  /// feature x data = ranks of `world`; `wide` > 0 adds a tensor of that many columns, `hooks` one that is packed by
  /// functions.
  Sample(const parallel::Communicator& world, int data, std::int64_t wide = 0, bool hooks = false) {
    using kernels::Scalar;
    const int feature = world.size() / data, feature_index = world.rank() % feature,
              data_index = world.rank() / feature;
    struct Kind {
      const char* name;
      Scalar type;
      std::vector<std::int64_t> shape;
      bool replicated;
    };
    std::vector<Kind> kinds = {
        {"encoder_0/weight", Scalar::fp32, {13, 7}, false},
        {"encoder_0/weight.first_moment", Scalar::bf16, {13, 7}, false},
        {"encoder_0/weight.codes", Scalar::u8, {13, 301}, false},
        {"encoder_0/tokens_since_fired", Scalar::i64, {13}, false},
        {"decoder_0/weight", Scalar::fp16, {2, 3, 5}, false},  // fewer rows than ranks: some own nothing
        {"decoder_bias", Scalar::fp32, {11}, true},
        {"statistics/mean_inputs", Scalar::fp64, {4, 5}, true},
        {"schedule/words", Scalar::u64, {1}, true}};
    if (wide > 0) kinds.push_back({"decoder_0/wide", Scalar::fp32, {5, wide}, false});
    memory.reserve(kinds.size());
    for (const Kind& kind : kinds) {
      Tensor tensor;
      tensor.name = kind.name;
      tensor.type = kind.type;
      tensor.shape = kind.shape;
      tensor.held =
          kind.replicated ? parallel::Range{0, kind.shape[0]} : parallel::part(kind.shape[0], feature, feature_index);
      const bool writes = data_index == 0 && (!kind.replicated || feature_index == 0);
      tensor.owned = writes ? tensor.held : parallel::Range{};
      memory.emplace_back(static_cast<std::size_t>(tensor.held.size() * tensor.row_bytes()) + 1);
      unsigned char* bytes = memory.back().data();
      tensor.data = bytes;
      if (hooks && tensor.name == "encoder_0/weight") {  // kept inverted in memory
        const std::int64_t row = tensor.row_bytes(), first = tensor.held.begin;
        tensor.data = nullptr;
        tensor.gather = [=](parallel::Range rows, void* to) {
          for (std::int64_t i = 0; i < rows.size() * row; ++i)
            static_cast<unsigned char*>(to)[i] = static_cast<unsigned char>(~bytes[(rows.begin - first) * row + i]);
        };
        tensor.scatter = [=](parallel::Range rows, const void* from) {
          for (std::int64_t i = 0; i < rows.size() * row; ++i)
            bytes[(rows.begin - first) * row + i] =
                static_cast<unsigned char>(~static_cast<const unsigned char*>(from)[i]);
        };
      }
      registry.add(std::move(tensor));
    }
  }

  std::vector<unsigned char> expected(std::size_t index, std::int64_t step) const {
    const Tensor& tensor = registry.tensors()[index];
    const std::int64_t width = kernels::bytes_of(tensor.type);
    std::vector<unsigned char> bytes(static_cast<std::size_t>(tensor.held.size() * tensor.row_bytes()));
    const std::int64_t first = tensor.held.begin * tensor.row_bytes() / width;
    const bool floating = tensor.type == kernels::Scalar::fp32 || tensor.type == kernels::Scalar::bf16 ||
                          tensor.type == kernels::Scalar::fp16 || tensor.type == kernels::Scalar::fp64;
    for (std::int64_t i = 0; i * width < static_cast<std::int64_t>(bytes.size()); ++i) {
      std::uint64_t bits = static_cast<std::uint64_t>(first + i + 1) * 0x9e3779b97f4a7c15u +
                           static_cast<std::uint64_t>(step) * 0xbf58476d1ce4e5b9u + index;
      bits = (bits ^ (bits >> 29)) * 0x94d049bb133111ebu;
      bits ^= bits >> 32;
      if (floating) bits &= ~(std::uint64_t{1} << (8 * width - 2));  // the exponent's top bit: never infinite or NaN
      std::memcpy(bytes.data() + i * width, &bits, static_cast<std::size_t>(width));
    }
    if (tensor.gather)
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(~byte);
    return bytes;
  }

  void fill(std::int64_t step) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const auto bytes = expected(i, step);
      std::memcpy(memory[i].data(), bytes.data(), bytes.size());
    }
  }
  void clear() {
    for (auto& bytes : memory) std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0x55));
  }
  bool holds(std::int64_t step) const {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const auto bytes = expected(i, step);
      if (std::memcmp(memory[i].data(), bytes.data(), bytes.size()) != 0) return false;
    }
    return true;
  }
};

inline Manifest manifest_of(std::int64_t step) {
  Manifest manifest;
  manifest.step = step;
  manifest.tokens = 512 * step;
  manifest.cursor = {{"epoch", step / 10}, {"position", step % 10}};
  manifest.grid = {{"data", 1}, {"feature", 1}};
  manifest.input = "[run]\nsteps = 1 # \"quoted\" \\ and \xc3\xbc\n";
  manifest.code_revision = "abc";
  manifest.libraries = {{"hdf5", "1.10.8"}};
  manifest.dataset_fingerprint = "f00d";
  manifest.extra = R"({"gemm":{"768x512":3},"norm":0.1})";
  return manifest;
}

}  // namespace weft::checkpoint::testing

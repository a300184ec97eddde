// SPDX-License-Identifier: Apache-2.0
//
// The bytes of every tensor of a registry, as a checkpoint would hold them.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/registry.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "tests/test.hpp"

namespace weft::testing {

/// The held rows of a tensor, wherever they are. Waits for the device.
inline std::vector<std::byte> bits_of(const checkpoint::Tensor& tensor) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.held.size() * tensor.row_bytes()));
  if (bytes.empty()) return bytes;
  kernels::fence(execution());
  if (tensor.gather)
    tensor.gather(tensor.held, bytes.data());
  else if (tensor.on_device)
    device::copy(execution(), bytes.data(), tensor.data, std::ssize(bytes), device::Direction::to_host);
  else
    std::memcpy(bytes.data(), tensor.data, bytes.size());
  kernels::fence(execution());
  return bytes;
}

/// The held rows of each tensor. Waits for the device.
inline std::map<std::string, std::vector<std::byte>> bits_of(const checkpoint::Registry& registry) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const checkpoint::Tensor& tensor : registry.tensors()) all[tensor.name] = bits_of(tensor);
  return all;
}

/// Names of the tensors that differ.
inline std::vector<std::string> different_tensors(const checkpoint::Registry& a, const checkpoint::Registry& b) {
  const auto first = bits_of(a), second = bits_of(b);
  std::vector<std::string> names;
  for (const auto& [name, bytes] : first)
    if (const auto at = second.find(name); at == second.end() || at->second != bytes) names.push_back(name);
  for (const auto& [name, bytes] : second)
    if (!first.contains(name)) names.push_back(name);
  return names;
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/registry.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace weft::checkpoint {
namespace {

/// A name cannot be both a dataset and a group of a HDF5 file.
bool one_contains_the_other(const std::string& a, const std::string& b) {
  return b.starts_with(a + "/") || a.starts_with(b + "/");
}

}  // namespace

std::int64_t Tensor::row_bytes() const {
  std::int64_t bytes = kernels::bytes_of(type);
  for (std::size_t axis = 1; axis < shape.size(); ++axis) bytes *= shape[axis];
  return bytes;
}

bool usable_name(std::string_view name) {
  const auto usable = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.' || c == '/';
  };
  constexpr std::size_t kLongest = 255;
  return !name.empty() && name.size() <= kLongest && std::all_of(name.begin(), name.end(), usable) &&
         name.front() != '/' && name.front() != '.' && name.back() != '/' && name.find("..") == name.npos &&
         name.find("//") == name.npos && name.find("/.") == name.npos;
}

void Registry::add(Tensor tensor) {
  const auto refuse = [&](const char* why) {
    throw error(ExitCode::internal, "tensor \"{}\" cannot be registered: {}", tensor.name, why);
  };
  if (!usable_name(tensor.name)) refuse("its name is not letters, digits, _ - . and inner /");
  for (const Tensor& other : tensors_)
    if (other.name == tensor.name || one_contains_the_other(other.name, tensor.name)) refuse("its name is taken");
  if (tensor.shape.empty() ||
      std::any_of(tensor.shape.begin(), tensor.shape.end(), [](std::int64_t extent) { return extent < 1; }))
    refuse("its shape has no elements");
  const auto inside = [](parallel::Range inner, std::int64_t begin, std::int64_t end) {
    return inner.begin >= begin && inner.begin <= inner.end && inner.end <= end;
  };
  if (!inside(tensor.held, 0, tensor.shape[0])) refuse("the rows it holds are outside its shape");
  if (tensor.owned.size() == 0) tensor.owned = {tensor.held.begin, tensor.held.begin};
  if (!inside(tensor.owned, tensor.held.begin, tensor.held.end)) refuse("it owns rows that it does not hold");
  if (static_cast<bool>(tensor.gather) != static_cast<bool>(tensor.scatter)) refuse("it has one of gather and scatter");
  if (tensor.held.size() > 0 && tensor.data == nullptr && !tensor.gather) refuse("it has no memory");
  tensors_.push_back(std::move(tensor));
}

const Tensor* Registry::find(const std::string& name) const {
  const auto at =
      std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& tensor) { return tensor.name == name; });
  return at == tensors_.end() ? nullptr : &*at;
}

std::int64_t Registry::bytes() const {
  std::int64_t total = 0;
  for (const Tensor& tensor : tensors_) total += tensor.owned.size() * tensor.row_bytes();
  return total;
}

std::int64_t Registry::held_bytes() const {
  std::int64_t total = 0;
  for (const Tensor& tensor : tensors_) total += tensor.held.size() * tensor.row_bytes();
  return total;
}

}  // namespace weft::checkpoint

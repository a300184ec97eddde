// SPDX-License-Identifier: Apache-2.0
#include "dataset/fingerprint.hpp"

#include <map>

namespace weft::dataset {
namespace {

std::map<std::string_view, std::string_view> digests(std::string_view fingerprint) {
  std::map<std::string_view, std::string_view> parts;
  while (!fingerprint.empty()) {
    const std::string_view part = fingerprint.substr(0, fingerprint.find(','));
    fingerprint.remove_prefix(part.size() == fingerprint.size() ? part.size() : part.size() + 1);
    const std::size_t colon = part.find(':');
    if (colon == part.npos)
      parts["ends"] = part;
    else
      parts[part.substr(0, colon)] = part.substr(colon + 1);
  }
  return parts;
}

}  // namespace

bool same_data(std::string_view fingerprint, std::string_view other) {
  const auto mine = digests(fingerprint), theirs = digests(other);
  bool any = false;
  for (const auto& [name, digest] : mine)
    if (const auto found = theirs.find(name); found != theirs.end()) {
      if (found->second != digest) return false;
      any = true;
    }
  return any;
}

}  // namespace weft::dataset

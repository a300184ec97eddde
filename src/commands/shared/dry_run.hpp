// SPDX-License-Identifier: Apache-2.0
//
// What --dry-run says about memory: needed, available, and whether the run fits. A run that does not fit ends with
// code 2 before this (require_memory, micro_tokens_that_fit), but for a plan without its data.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.hpp"

namespace weft::commands {

/// Bytes per rank; available 0: not known.
struct MemoryNeed {
  std::int64_t device = 0, device_available = 0;
  std::int64_t host = 0, host_available = 0;
  std::string host_limit = {};    ///< what limits host memory
  std::int64_t micro_tokens = 0;  ///< data.micro_tokens with which the run fits; 0: as the input has it

  bool fits() const;
};

/// A line for the device and one for the host.
std::string to_text(const MemoryNeed& need);
Json to_json(const MemoryNeed& need);

/// `need` and the plan by purpose.
template <class Plan>
Json plan_document(const Plan& plan, const MemoryNeed& need) {
  Json document = to_json(need);
  for (const auto& [place, rows] : {std::pair("device", &plan.device), std::pair("host", &plan.host)}) {
    Json& purposes = document[place] = Json::object();
    for (const auto& [purpose, bytes] : *rows)
      if (bytes > 0) purposes[purpose] = bytes;
  }
  document["checkpoint_bytes"] = plan.checkpoint_bytes;
  document["disk_bytes"] = plan.disk_bytes;
  return document;
}

}  // namespace weft::commands

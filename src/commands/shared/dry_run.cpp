// SPDX-License-Identifier: Apache-2.0
#include "commands/shared/dry_run.hpp"

#include <fmt/format.h>

#include "kernels/execution.hpp"
#include "report/format.hpp"

namespace weft::commands {
namespace {

bool enough(std::int64_t needed, std::int64_t available) { return available == 0 || needed <= available; }

std::string comparison(std::int64_t needed, std::int64_t available, const std::string& memory) {
  return fmt::format("{}: {} of {} {}, per rank ({:.0f} %)", enough(needed, available) ? "fits" : "does not fit",
                     report::binary_bytes_text(needed), report::binary_bytes_text(available), memory,
                     100 * static_cast<double>(needed) / static_cast<double>(available));
}

}  // namespace

bool MemoryNeed::fits() const { return enough(device, device_available) && enough(host, host_available); }

std::string to_text(const MemoryNeed& need) {
  std::string text;
  if (need.device_available > 0)
    text = comparison(need.device, need.device_available, "of device memory") +
           (need.micro_tokens > 0 ? fmt::format(", with data.micro_tokens = {}", need.micro_tokens) : "");
  else if (kernels::kCudaBuild)
    text = "device memory is not compared; --device-memory 141GB says whether the run fits a GPU of 141 GB";
  if (need.host_available > 0)
    text += (text.empty() ? "" : "\n") +
            comparison(need.host, need.host_available, fmt::format("of host memory ({})", need.host_limit));
  return text;
}

Json to_json(const MemoryNeed& need) {
  Json document = {{"fits", need.fits()}, {"device_bytes", need.device}, {"host_bytes", need.host}};
  if (need.device_available > 0) document["device_available_bytes"] = need.device_available;
  if (need.host_available > 0) document["host_available_bytes"] = need.host_available;
  if (need.micro_tokens > 0) document["micro_tokens"] = need.micro_tokens;
  return document;
}

}  // namespace weft::commands

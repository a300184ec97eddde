// SPDX-License-Identifier: Apache-2.0
//
// metrics.jsonl: one JSON object per line and logged step, ascending, flushed line by line. A resumed run continues
// after the step from which it resumed, so that the file is the same as without the interruption.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/file.hpp"
#include "report/json.hpp"

namespace weft::report {

class MetricsWriter {
 public:
  /// Keeps the records up to and including `resumed_step` (-1: a new run, none) and appends. An incomplete line, left
  /// by a kill, is dropped together with all that follows it. Throws Error(io).
  MetricsWriter(const std::filesystem::path& path, std::int64_t resumed_step);

  /// `record` has an integer "step". Throws Error(io) when it cannot be written.
  void write(const Json& record);

 private:
  std::filesystem::path path_;
  Descriptor file_;
};

}  // namespace weft::report

// SPDX-License-Identifier: Apache-2.0
//
// metrics.jsonl: one JSON object a line for each logged step, in the order of the steps, flushed line by line. Whoever
// resumes a run goes on behind the step it resumes from, so that the file reads as if nothing had happened.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "report/json.hpp"

namespace weft::report {

class MetricsWriter {
 public:
  /// Keeps the records up to and with `resumed_step` (-1: a new run, none) and appends. A torn last line, left by a
  /// kill, is dropped with what follows it. Throws Error(io).
  MetricsWriter(const std::filesystem::path& path, std::int64_t resumed_step);

  /// `record` has an integer "step". Throws Error(io) when the line did not reach the file.
  void write(const Json& record);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace weft::report

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::commands {

enum class Formulation { sparse, dense };

/// Table [benchmark].
struct BenchmarkSettings {
  std::int64_t layers = 12;
  std::int64_t d_model = 768;
  std::int64_t warmup = 20;  ///< steps of training before the clock runs
  std::int64_t steps = 20;   ///< measured steps, of which the median counts
  std::int64_t batches = 4;  ///< resident batches, taken in turn
  double zipf = 1.0;
  Formulation formulation = Formulation::sparse;
  std::vector<std::string> cases = {"sparse"};  ///< "name" or "name: table.key=value, table.key=value"
  double compare_ratio = 1.1;
  bool checkpoint = false;  ///< also write and read a checkpoint of the state
};

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "training/benchmark.hpp"

namespace weft::transcoder {

enum class Formulation { sparse, dense };

/// Table [benchmark].
struct BenchmarkSettings : training::BenchmarkSettings {
  std::int64_t layers = 12;
  std::int64_t d_model = 768;
  Formulation formulation = Formulation::sparse;
};

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, BenchmarkSettings&);

}  // namespace weft::transcoder

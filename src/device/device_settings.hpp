// SPDX-License-Identifier: Apache-2.0
//
// Table [device]: what computes, and in which precision.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "input/schema.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// Type of products, partial sums and gradient rows; sums are fp32 in all. tf32: storage in fp32, products in TF32.
enum class Precision { fp32, tf32, bf16, fp16 };

/// Table [device], but for device.precision.
struct Settings {
  std::string backend = "auto";   ///< auto | portable | cuda
  int threads = 0;                ///< host threads of this process; 0 = its CPUs / processes that share them
  std::string affinity = "auto";  ///< auto | none: parallel/affinity.hpp
  bool graphs = true;             ///< on a GPU: capture a step once as a graph and replay it
  std::string algorithms;  ///< file with algorithms of the dense library; "" = the first that the library proposes
  double memory = 0;       ///< GB of a GPU that may be used; 0 = all that is free
  // No keys: set by for_precision.
  bool tf32 = false;
  std::string backend_reason;  ///< why "auto" became "portable"
};

/// The kernels that a run with these settings uses, also on a machine that only plans it.
kernels::Backend planned_backend(const Settings&);

/// True if activations and products are stored in fp32.
constexpr bool is_wide(Precision precision) { return precision == Precision::fp32 || precision == Precision::tf32; }

/// The settings for this precision. Backend "auto" means the portable kernels where activations are fp32: the
/// hand-written ones compute in 16 bits.
Settings for_precision(Settings settings, Precision precision);

/// Names of precisions in an input.
using PrecisionNames = std::vector<std::pair<std::string, Precision>>;

/// The keys of the table and the conditions between them, bound to the settings, which must outlive the schema.
/// `names`: the precisions that the model family has.
void add_keys(input::Schema& schema, Settings& device, Precision& precision, const PrecisionNames& names,
              std::string_view precision_help);

}  // namespace weft::device

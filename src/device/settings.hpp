// SPDX-License-Identifier: Apache-2.0
//
// Table [device]: what computes, and in which precision.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/host_program.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"

namespace weft::device {

/// Type of products, partial sums and gradient rows; sums are fp32 in all. tf32: storage in fp32, products in TF32.
enum class Precision { fp32, tf32, bf16, fp16 };

/// Table [device], but for device.precision.
struct Settings {
  std::string backend = "auto";   ///< auto | portable | cuda
  int threads = 0;                ///< host threads of this process; 0 = its CPUs / processes that share them
  std::string affinity = "auto";  ///< auto | none: parallel/affinity.hpp
  bool graphs = true;             ///< on a GPU: record a step once and replay it
  std::string algorithms;  ///< file with algorithms of the dense library; "" = the first that the library proposes
  /// Kernels of attention; recorded: those that `algorithms` names, else the own ones.
  kernels::AttentionImplementation attention = kernels::AttentionImplementation::recorded;
  std::int64_t tile = 0;  ///< MiB of pre-activations made at a time; 0 = as many as suit the backend
  double memory = 0;      ///< GB of a GPU that may be used; 0 = all that is free
  bool tf32 = false;      ///< no key: set by for_precision
};

/// The kernels that a run with these settings uses, also on a machine that only plans it.
kernels::Backend planned_backend(const Settings&);

/// True if activations and products are stored in fp32.
constexpr bool is_wide(Precision precision) { return precision == Precision::fp32 || precision == Precision::tf32; }

/// The settings for this precision. Backend "auto" means the portable kernels where activations are fp32: the
/// hand-written ones compute in 16 bits.
inline Settings for_precision(Settings settings, Precision precision) {
  if (settings.backend == "auto" && is_wide(precision)) settings.backend = "portable";
  settings.tf32 = precision == Precision::tf32;
  return settings;
}

/// Names of precisions in an input.
using PrecisionNames = std::vector<std::pair<std::string, Precision>>;

/// The keys of the table and the conditions between them, bound to the settings, which must outlive the schema. A
/// template because input::Schema is in a higher module. `names`: the precisions that the model family has.
template <class Schema>
void add_keys(Schema& schema, Settings& device, Precision& precision, const PrecisionNames& names,
              std::string_view precision_help) {
  schema.table("device", "The hardware to compute on, and its precision.");
  schema
      .add("device.backend", device.backend,
           "kernels: hand-written CUDA, portable Kokkos, or the best that this program and machine have")
      .one_of({"auto", "portable", "cuda"})
      .free();
  schema.add("device.precision", precision, names, precision_help).free();
  schema
      .add("device.graphs", device.graphs,
           "on a GPU: record a training step once and replay it (less work for the host)")
      .free();
  schema
      .add("device.algorithms", device.algorithms,
           "on a GPU: file written by weft benchmark --tune; \"\" = the dense library's first proposal")
      .path_name()
      .free();
  schema
      .add("device.memory", device.memory,
           "memory of a GPU that may be used; 0 = all that is free (with --dry-run: not checked)")
      .in("GB")
      .at_least(0.0)
      .free();
  schema
      .add("device.threads", device.threads,
           "host threads of each process; 0 = OMP_NUM_THREADS, else its CPUs / processes that share them")
      .in("threads")
      .at_least(0)
      .at_most(4096)
      .free();
  schema
      .add("device.affinity", device.affinity,
           "auto: each process keeps to those of its CPUs that are near its GPU, and processes that the launcher left "
           "on "
           "the same CPUs divide them; none: masks stay as they are")
      .one_of({"auto", "none"})
      .free();
  schema.rule({"device.backend", "device.precision"}, [&device, &precision]() -> std::string {
    if (device.backend != "cuda") return {};
    if (!kernels::kCudaBuild) return cuda_unavailable();
    if (!is_wide(precision)) return {};
    return std::string("device.backend = \"cuda\" with device.precision = \"") +
           (precision == Precision::fp32 ? "fp32" : "tf32") +
           "\" (the hand-written kernels compute in 16 bits); take precision = \"bf16\" or backend = \"portable\"";
  });
}

/// device.tile, of models with features.
template <class Schema>
void add_tile_key(Schema& schema, Settings& device) {
  schema.add("device.tile", device.tile, "pre-activations made at a time; 0 = as many as suit the processor or GPU")
      .in("MiB")
      .at_least(0)
      .at_most(1 << 16)
      .free();
}

/// device.attention, of language models.
template <class Schema>
void add_attention_key(Schema& schema, Settings& device, Precision& precision) {
  using kernels::AttentionImplementation;
  schema
      .add("device.attention", device.attention,
           {{"auto", AttentionImplementation::recorded},
            {"own", AttentionImplementation::own},
            {"cudnn", AttentionImplementation::cudnn}},
           "kernels of attention on a GPU: those that device.algorithms records, own where it has none; or always "
           "Weft's own, or cuDNN's")
      .free();
  schema.rule({"device.attention", "device.precision", "device.backend"}, [&device, &precision]() -> std::string {
    if (device.attention != AttentionImplementation::cudnn) return {};
    if (!kernels::kCudnnBuild)
      return "device.attention = \"cudnn\" is not available (built without cuDNN); take \"auto\", or build with "
             "WEFT_ENABLE_CUDA and the headers of cuDNN (scripts/setup.sh --cuda)";
    if (is_wide(precision) || device.backend == "portable")
      return "device.attention = \"cudnn\" without the CUDA kernels in 16 bits (cuDNN computes attention in them "
             "alone); take device.precision = \"bf16\", or attention = \"auto\"";
    return {};
  });
}

}  // namespace weft::device

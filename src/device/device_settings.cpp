// SPDX-License-Identifier: Apache-2.0
#include "device/device_settings.hpp"

#include "device/host_program.hpp"

namespace weft::device {

Settings for_precision(Settings settings, Precision precision) {
  if (settings.backend == "auto" && is_wide(precision)) {
    settings.backend = "portable";
    settings.backend_reason =
        "activations are in fp32; device.precision = \"bf16\" takes the hand-written kernels, which are many times as "
        "fast";
  }
  settings.tf32 = precision == Precision::tf32;
  return settings;
}

void add_keys(input::Schema& schema, Settings& device, Precision& precision, const PrecisionNames& names,
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
           "on a GPU: capture a training step as a CUDA graph and replay it (less work for the host)")
      .free();
  schema
      .add("device.algorithms", device.algorithms,
           "on a GPU: file written by weft benchmark --tune; \"\" = default algorithms of the dense library")
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
           "auto: each process runs on those of its CPUs that are near its GPU, and processes on the same CPUs "
           "divide them; none: the launcher's binding is kept")
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

}  // namespace weft::device

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/benchmark/settings.hpp"

#include "input/schema.hpp"
#include "kernels/constants.hpp"

namespace weft::transcoder {

void add_keys(input::Schema& schema, BenchmarkSettings& b) {
  schema.table("benchmark", "Resident batches and cases, for weft benchmark.");
  schema.add("benchmark.layers", b.layers, "layers").at_least(1).at_most(kernels::kMostLayers).free();
  schema.add("benchmark.d_model", b.d_model, "dimensions of an activation").at_least(1).free();
  training::add_step_keys(schema, b, "planted features");
  schema
      .add("benchmark.formulation", b.formulation, {{"sparse", Formulation::sparse}, {"dense", Formulation::dense}},
           "the sparse step of weft train, or the dense one that it is compared with")
      .free();
  training::add_case_keys(schema, b, "the case named dense is the dense formulation");
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/transcoder_settings.hpp"

#include "input/schema.hpp"
#include "kernels/constants.hpp"

namespace weft::bench {

void add_keys(input::Schema& schema, TranscoderSettings& b, const transcoder::Configuration& configuration) {
  schema.table("benchmark", "Batches, cases and baselines, for weft benchmark.");
  schema.add("benchmark.layers", b.layers, "layers").at_least(1).at_most(kernels::kMostLayers).free();
  schema.add("benchmark.d_model", b.d_model, "dimensions of an activation").at_least(1).free();
  schema
      .add("benchmark.from", b.from, {{"resident", Batches::resident}, {"data", Batches::data}},
           "where batches come from: planted features in memory; or data.train or data.model, read or computed while "
           "steps run, with the layers and dimensions of the data")
      .free();
  add_step_keys(schema, b, "planted features");
  schema
      .add("benchmark.formulation", b.formulation, {{"sparse", Formulation::sparse}, {"dense", Formulation::dense}},
           "the sparse step of weft train, or the dense one that it is compared with")
      .free();
  schema
      .add("benchmark.selection", b.selection,
           {{"everywhere", SelectionPlace::everywhere}, {"rank_0", SelectionPlace::rank_0}},
           "all ranks select together, as in training, or rank 0 alone from all pre-activations (batch_topk only)")
      .formerly("parallel.selection")
      .free();
  schema.add("benchmark.wait", b.wait, "true: the host waits for each exchange of GPUs (those of CPUs always wait)")
      .formerly("parallel.wait")
      .free();
  schema
      .add("benchmark.together", b.together,
           "false: rows and counts are exchanged layer by layer instead of all at once")
      .formerly("parallel.together")
      .free();
  schema.add("benchmark.keep_buffers", b.keep_buffers, "false: memory of exchanges is allocated and freed each time")
      .formerly("parallel.keep_buffers")
      .free();
  schema
      .add("benchmark.direct", b.direct,
           "GPUs of one host write rows directly into the memory of the others, as in training; false, or where they "
           "cannot: NCCL sends them")
      .formerly("parallel.direct")
      .free();
  schema
      .add("benchmark.prefetch", b.prefetch,
           "from = \"data\": rows are read ahead of the steps, as in training; false: each shuffle block when its "
           "first row "
           "is needed")
      .formerly("data.prefetch")
      .free();
  schema.retired("privacy.overlap", "private steps always exchange sums while others are formed; leave it out");
  add_case_keys(schema, b, "the case named dense is the dense formulation");
  schema.rule({"benchmark.selection", "transcoder.activation"}, [&]() -> std::string {
    if (b.selection == SelectionPlace::everywhere ||
        configuration.transcoder.activation == kernels::Activation::batch_topk)
      return {};
    return "benchmark.selection = \"rank_0\" is for transcoder.activation = \"batch_topk\" only (the others do not "
           "compare tokens with one another); take \"everywhere\"";
  });
  schema.rule({"benchmark.selection", "transcoder.k_initial"}, [&]() -> std::string {
    if (b.selection == SelectionPlace::everywhere || configuration.transcoder.k_initial == 0) return {};
    return "benchmark.selection = \"rank_0\" does not go with transcoder.k_initial (it is a baseline with a constant "
           "k); take \"everywhere\"";
  });
}

}  // namespace weft::bench

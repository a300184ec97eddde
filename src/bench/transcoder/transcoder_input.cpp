// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/transcoder_input.hpp"

#include "kernels/constants.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::bench {
namespace {

void add_benchmark_keys(input::Schema& schema, TranscoderSettings& b, const transcoder::Configuration& configuration) {
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
  add_case_keys(schema, b, "\"dense\" is the dense formulation");
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

input::Schema keys_of_tables(TranscoderInput& input, bool trains) {
  input::Schema keys = transcoder::schema(input.configuration);
  if (trains) transcoder::add_training_rules(keys, input.configuration);
  dataset::add_keys(keys, input.synthetic);
  add_benchmark_keys(keys, input.benchmark, input.configuration);
  return keys;
}

}  // namespace

input::Schema training_keys(TranscoderInput& input) {
  input::Schema keys = keys_of_tables(input, true);
  keys.at("data.train").required("\"data/train\"", "data.model");
  return keys;
}

input::Schema benchmark_keys(TranscoderInput& input) { return keys_of_tables(input, true); }

input::Schema trained_keys(TranscoderInput& input) {
  input::Schema keys = keys_of_tables(input, false);
  keys.at("transcoder.features").must_be_given = false;
  return keys;
}

input::Schema dataset_keys(TranscoderInput& input) {
  input::Schema keys = trained_keys(input);
  keys.at("transcoder.features").at_least(0);  // the key may be missing on every rank
  return keys;
}

}  // namespace weft::bench

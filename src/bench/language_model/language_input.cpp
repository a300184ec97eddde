// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/language_input.hpp"

#include "bench/language_model/named_cases.hpp"
#include "input/schema.hpp"
#include "language_model/run/initial_model.hpp"

namespace weft::bench {

LanguageSettings::LanguageSettings() { cases = default_cases(); }

input::Schema language_keys(LanguageInput& input) {
  input::Schema schema = polychromic::schema(input.configuration);
  LanguageSettings& b = input.benchmark;
  schema.table("benchmark", "Batches in memory and cases, for weft benchmark.");
  schema
      .add("benchmark.data", b.data,
           "token file, or directory of token files, whose first ids are the batches; \"\" = random ids")
      .path_name()
      .free();
  schema.add("benchmark.vocabulary", b.vocabulary, "number of ids")
      .at_least(2)
      .at_most(1 << 24)  // bounds the table of their frequencies
      .free();
  schema
      .add("benchmark.batch_tokens", b.batch_tokens,
           "tokens per step of the baseline, as one micro-batch, and of the cases that are compared with it; 0 = "
           "data.batch_tokens")
      .in("tokens")
      .at_least(0)
      .at_most(1 << 28)
      .free();
  add_step_keys(schema, b, "ids");
  schema
      .add("benchmark.attention", b.attention,
           {{"flash", BenchmarkAttention::flash}, {"matrix", BenchmarkAttention::matrix}},
           "the attention of training, or the one with the matrix of scores in memory that it is compared with")
      .free();
  schema
      .add("benchmark.generate_tokens", b.generate_tokens,
           "tokens that a step generates for each sequence instead of training, with a cache of keys and values; "
           "0 = training")
      .in("tokens")
      .at_least(0)
      .at_most(1 << 16)
      .free();
  schema.add("benchmark.generate_rows", b.generate_rows, "generate_tokens > 0: sequences that are computed together")
      .at_least(1)
      .at_most(1 << 14)
      .free();
  schema.add("benchmark.generate_samples", b.generate_samples, "sequences that continue the same prompt")
      .at_least(1)
      .at_most(1 << 14)
      .free();
  schema.add("benchmark.generate_prompt", b.generate_prompt, "length of a prompt")
      .in("tokens")
      .at_least(1)
      .at_most(1 << 16)
      .free();
  schema
      .add("benchmark.harvest", b.harvest,
           {{"off", BenchmarkHarvest::off}, {"compute", BenchmarkHarvest::compute}, {"host", BenchmarkHarvest::host}},
           "a step records inputs and outputs of all MLPs on data.batch_tokens ids instead of training: where the "
           "kernels run (compute), or to host memory, as weft lm harvest does before it writes (host)")
      .free();
  schema
      .add("benchmark.overlap", b.overlap,
           "between ranks: gradients, weights and activations of the tensor axis are exchanged during the "
           "computation, as in training; false: the computation waits for each exchange")
      .formerly("parallel.overlap")
      .free();
  schema
      .add("benchmark.private_overlap", b.private_overlap,
           "between ranks: clipped sums are exchanged while others are formed, as in training (not with naive); "
           "false: after the last one")
      .formerly("privacy.overlap")
      .free();
  schema
      .add("benchmark.loss_tolerance", b.loss_tolerance,
           "largest relative difference of a valid case's loss from that of the baseline")
      .at_least(0)
      .free();
  schema
      .add("benchmark.peak_tflops", b.peak_tflops,
           "dense bf16 peak of the device, for the utilisation (MFU); 0 = no MFU")
      .in("TFLOP/s")
      .at_least(0)
      .free();
  add_case_keys(schema, b,
                "\"input\" is the input as it is; baseline, A, B, safe, all and optimisations joined by "
                "\" + \" are those of docs/experiments.md");
  return schema;
}

input::Schema language_training_keys(LanguageInput& input) {
  input::Schema keys = language_keys(input);
  keys.at("data.train").required("\"data/text.txt\"");
  keys.otherwise([&input] { return language_model::table_of_initial(input.configuration); });
  return keys;
}

}  // namespace weft::bench

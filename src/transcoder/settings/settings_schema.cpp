// SPDX-License-Identifier: Apache-2.0
#include "transcoder/settings/settings_schema.hpp"

#include "transcoder/settings/presets.hpp"

namespace weft::transcoder {

input::Schema schema(Configuration& configuration) {
  input::Schema schema;
  run::add_keys(schema, configuration.run);
  dataset::add_keys(schema, configuration.data);
  add_model_keys(schema, configuration.transcoder);
  optimizer::add_keys(schema, configuration.optimizer, true);
  privacy::add_keys(schema, configuration.privacy);
  parallel::add_keys(schema, configuration.parallel);
  schema
      .add("parallel.tensor", configuration.parallel.tensor,
           "neighbouring ranks that share the weights of data.model, for models that do not fit one GPU; a "
           "divisor of the number of ranks. All ranks train the transcoder")
      .in("ranks")
      .at_least(1)
      .at_most(1 << 10)
      .only_with("data.model")
      .free();
  device::add_keys(schema, configuration.device, configuration.precision,
                   {{"fp32", Precision::fp32}, {"bf16", Precision::bf16}},
                   "type of activations, products and gradient rows; sums are fp32 in both");
  schema.add("device.tile", configuration.tile, "pre-activations computed at a time; 0 = automatic")
      .in("MiB")
      .at_least(0)
      .at_most(1 << 16)
      .free();
  checkpoint::add_keys(schema, configuration.checkpoint);
  run::add_keys(schema, configuration.log);
  run::add_keys(schema, configuration.resume);
  add_rules(schema, configuration);
  add_private_keys(schema, configuration);
  add_preset(schema, configuration.transcoder);
  optimizer::add_warmup_fraction(schema, configuration.optimizer);
  return schema;
}

}  // namespace weft::transcoder

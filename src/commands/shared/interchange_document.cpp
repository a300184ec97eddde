// SPDX-License-Identifier: Apache-2.0
#include "commands/shared/interchange_document.hpp"

namespace weft::commands {

Json document_of(const interchange::Opened& opened) {
  const interchange::Contents& contents = opened.rows->contents();
  Json document = {{"format", opened.format},
                   {"layers", contents.sizes.n_layers},
                   {"d_model", contents.sizes.d_model},
                   {"features", contents.sizes.n_features},
                   {"activation", contents.k > 0        ? "topk"
                                  : contents.thresholds ? "jumprelu"
                                                        : "relu"},
                   {"per_layer", contents.per_layer},
                   {"autoencoder", contents.autoencoder},
                   {"skip", contents.skip}};
  if (contents.k > 0) document["k"] = contents.k;
  for (const auto& [name, text] : opened.facts) document[name] = text;
  return document;
}

}  // namespace weft::commands

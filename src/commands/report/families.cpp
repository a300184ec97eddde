// SPDX-License-Identifier: Apache-2.0
#include "commands/report/language_model/part.hpp"
#include "commands/report/page.hpp"
#include "commands/report/transcoder/part.hpp"

namespace weft::commands {

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"transcoder",
       "transcoders",
       transcoder_part,
       {{"validation NMSE (standardised)", {"validation", "nmse_standardised_mean"}},
        {"training NMSE (standardised)", {"train", "nmse_standardised"}},
        {"explained variance", {"validation", "explained_variance_mean"}},
        {"L0", {"validation", "l0_mean"}},
        {"dead fraction", {"validation", "dead_fraction_mean"}},
        {"recovered", {"recovery", "fraction"}}}},
      {"language_model",
       "language models",
       language_model_part,
       {{"validation loss", {"validation", "loss"}},
        {"training loss", {"train", "loss"}},
        {"perplexity", {"validation", "perplexity"}},
        {"bits per byte", {"validation", "bits_per_byte"}}}}};
  return all;
}

}  // namespace weft::commands

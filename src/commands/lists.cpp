// SPDX-License-Identifier: Apache-2.0
//
// The lists of commands and of model families. Each is defined in a source of its name.
#include "commands/family.hpp"

namespace weft::commands {

extern const Command train_command, synth_command, evaluate_command, features_command, encode_command, convert_command,
    inspect_command, benchmark_command, export_command, import_command, privacy_command, language_train_command,
    polychromic_command, language_evaluate_command, harvest_command, language_export_command, merge_command,
    generate_command, diversity_command, tokenize_command;
extern const Family transcoder_family, language_model_family;

std::span<const Command* const> command_list() {
  static constexpr const Command* all[] = {&train_command,       &synth_command,
                                           &evaluate_command,    &features_command,
                                           &encode_command,      &convert_command,
                                           &inspect_command,     &benchmark_command,
                                           &export_command,      &import_command,
                                           &privacy_command,     &language_train_command,
                                           &polychromic_command, &language_evaluate_command,
                                           &harvest_command,     &language_export_command,
                                           &merge_command,       &generate_command,
                                           &diversity_command,   &tokenize_command};
  return all;
}

std::span<const Group> groups() {
  static constexpr Group all[] = {
      {"lm", "language models: weft lm --help", "Language models: GPT-2- and Llama-style transformers."}};
  return all;
}

std::span<const Family* const> families() {
  static constexpr const Family* all[] = {&transcoder_family, &language_model_family};
  return all;
}

}  // namespace weft::commands

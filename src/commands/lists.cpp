// SPDX-License-Identifier: Apache-2.0
//
// The lists of commands and of model families. Each is defined in the source of its name; `weft lm NAME` is
// lm_NAME_command. lm_polychromic_command is in lm_train_command.cpp: both train a language model.
#include "commands/family.hpp"

namespace weft::commands {

extern const Command init_command, train_command, synth_command, evaluate_command, features_command, encode_command,
    convert_command, inspect_command, attribute_command, benchmark_command, export_command, import_command,
    privacy_command, privacy_audit_command, lm_train_command, lm_polychromic_command, lm_evaluate_command,
    lm_harvest_command, lm_export_command, lm_merge_command, lm_generate_command, lm_diversity_command,
    lm_tokenize_command;
extern const Family transcoder_family, language_model_family;

std::span<const Command* const> command_list() {
  static constexpr const Command* all[] = {
      &init_command,           &train_command,        &synth_command,      &evaluate_command,      &features_command,
      &encode_command,         &convert_command,      &attribute_command,  &inspect_command,       &benchmark_command,
      &export_command,         &import_command,       &privacy_command,    &privacy_audit_command, &lm_train_command,
      &lm_polychromic_command, &lm_evaluate_command,  &lm_harvest_command, &lm_export_command,     &lm_merge_command,
      &lm_generate_command,    &lm_diversity_command, &lm_tokenize_command};
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

// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/keys/model_family.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace weft::language_model {
namespace {

/// The names in [language_model], in the order of the parameters.
std::vector<std::string> names_of(Biases biases, bool gated) {
  std::vector<std::string> names;
  if (biases != Biases::mlp) names = {"query", "key", "value"};
  if (biases == Biases::attention || biases == Biases::all) names.push_back("output");
  if (biases == Biases::mlp || biases == Biases::all) {
    if (gated) names.push_back("gate");
    names.push_back("up");
    names.push_back("down");
  }
  return names;
}

}  // namespace

Biases biases_of(const ModelSettings& model) {
  if (model.biases.empty()) return model.bias ? Biases::all : Biases::none;
  // Norms have biases with `bias`, and products not: no family is so.
  if (model.bias && model.norm == Norm::layer) return Biases::other;
  std::vector<std::string> given = model.biases;
  std::sort(given.begin(), given.end());
  for (const Biases kind : {Biases::query_key_value, Biases::attention, Biases::mlp, Biases::all}) {
    std::vector<std::string> names = names_of(kind, kernels::is_gated(model.mlp));
    std::sort(names.begin(), names.end());
    if (names == given) return kind;
  }
  return Biases::other;
}

void set_biases(ModelSettings& model, Biases biases) {
  model.bias = biases == Biases::all;
  model.biases.clear();
  if (biases != Biases::all && biases != Biases::none) model.biases = names_of(biases, kernels::is_gated(model.mlp));
}

}  // namespace weft::language_model

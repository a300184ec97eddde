// SPDX-License-Identifier: Apache-2.0
//
// Where the parameters of a model lie in the tensors of the transformers library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model {

/// A parameter in the files of the library.
struct Place {
  std::string tensor;                ///< "model.layers.0.mlp.up_proj.weight"
  std::string other;                 ///< its name in files of other versions; "": none
  std::vector<std::int64_t> shape;   ///< of the tensor
  bool inputs_first = false;         ///< a matrix is [inputs, outputs], not [outputs, inputs]
  std::int64_t part = 0, parts = 1;  ///< of the tensor, cut by outputs (of a vector: elements)
  std::int64_t first_output = 0;     ///< of the tensor
  std::int64_t unit = 0, pitch = 0;  ///< units of outputs begin at every pitch-th one of the tensor; 0: all follow
  float offset = 0;                  ///< added to what is stored

  std::int64_t outputs() const { return inputs_first ? shape[1] : shape[0]; }
  /// The output of the tensor that output `own` of the parameter is.
  std::int64_t output(std::int64_t own) const {
    return first_output + (unit == 0 ? own : own / unit * pitch + own % unit);
  }
};

/// The place of each parameter of parameter_specs(architecture). Throws a collective Error(usage) that names one which
/// the family does not have.
std::vector<Place> places(const Family&, const Architecture&);

/// The name by which PEFT finds a linear layer in each block: the last word of the tensor's name without ".weight", or
/// the last two in a family in which words stand for several layers.
std::string peft_target(const Family&, const std::string& layer);

}  // namespace weft::language_model

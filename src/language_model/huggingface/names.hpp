// SPDX-License-Identifier: Apache-2.0
//
// Where the parameters of a model lie in the tensors of the transformers library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "language_model/huggingface/config.hpp"

namespace weft::language_model {

/// A parameter in the files of the library.
struct Place {
  std::string tensor;                ///< "model.layers.0.mlp.up_proj.weight"
  std::vector<std::int64_t> shape;   ///< of the tensor
  bool inputs_first = false;         ///< a matrix is [inputs, outputs], not [outputs, inputs]
  std::int64_t part = 0, parts = 1;  ///< of the outputs, or of the elements of a vector
  float offset = 0;                  ///< added to what is stored
};

/// The place of each parameter of parameter_specs(architecture).
std::vector<Place> places(Family, const Architecture&);

}  // namespace weft::language_model

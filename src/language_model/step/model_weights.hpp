// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a language model in memory.
#pragma once

#include "base/json.hpp"
#include "checkpoint/manifest.hpp"
#include "device/memory.hpp"
#include "language_model/blocks/layers.hpp"
#include "language_model/settings/configuration.hpp"
#include "model/weight_slots.hpp"

namespace weft::language_model {

class Model {
 public:
  /// Allocates the model; the caller initialises the parameters or loads a checkpoint. slots: as for Parameters.
  Model(const Architecture&, kernels::StorageType, const parallel::GridShape&, std::int64_t rank,
        const kernels::Execution&, model::Moments, const model::WeightSlots* slots = nullptr);
  Model(const Model&) = delete;

  void initialise(std::uint64_t seed) { parameters_.initialise(seed); }

  const Architecture& architecture() const { return architecture_; }  ///< of the whole model, on any grid
  const model::Parameters& parameters() const { return parameters_; }
  const kernels::Execution& execution() const { return execution_; }

  /// The parameters as products and norms read them.
  const Layers& layers() const { return layers_; }

 private:
  const Architecture architecture_;
  const kernels::Execution execution_;
  model::Parameters parameters_;
  device::Buffer<float> rotary_;
  const Layers layers_;
};

/// Elements of the tables of rotary positions.
std::int64_t rotary_elements(const Architecture&);

/// Architecture of the model in a checkpoint, from its input and its manifest. Throws a collective Error(io) if they
/// are not those of a language model.
Architecture stored_architecture(const Configuration&, const checkpoint::Manifest&);
/// Manifest::extra of a checkpoint of this model: its longest text, which no tensor shows if positions are rotary,
/// and its family.
Json manifest_extra(const Architecture&);

}  // namespace weft::language_model

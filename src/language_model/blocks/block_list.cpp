// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/block_list.hpp"

#include <memory>
#include <utility>

#include "language_model/blocks/attention_sublayer.hpp"
#include "language_model/blocks/mlp_sublayer.hpp"

namespace weft::language_model {

std::vector<ResidualSublayer> make_sublayers(const Architecture& architecture) {
  std::vector<ResidualSublayer> sublayers;
  for (std::int64_t block = 0; block < architecture.model.layers; ++block) {
    std::vector<std::unique_ptr<Sublayer>> of_block;
    of_block.push_back(std::make_unique<AttentionSublayer>(architecture, block));
    of_block.push_back(std::make_unique<MlpSublayer>(architecture, block));
    for (std::size_t i = 0; i < of_block.size(); ++i)
      sublayers.emplace_back(std::move(of_block[i]), std::ssize(sublayers), i == 0, i + 1 == of_block.size());
  }
  return sublayers;
}

}  // namespace weft::language_model

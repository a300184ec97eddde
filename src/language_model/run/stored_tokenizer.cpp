// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/stored_tokenizer.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "storage/token_file.hpp"

namespace weft::language_model {
namespace {

constexpr const char* kTokenizer = "tokenizer";

}  // namespace

checkpoint::Tensor tokenizer_tensor(std::vector<std::uint8_t>& text, bool writes) {
  const auto size = static_cast<std::int64_t>(text.size());
  return {.name = kTokenizer,
          .type = kernels::Scalar::u8,
          .shape = {size},
          .held = {0, size},
          .owned = {0, writes ? size : 0},
          .data = text.data()};
}

std::optional<Tokenizer> stored_tokenizer(const checkpoint::Found& found, const parallel::World& world,
                                          const kernels::Execution& execution) {
  for (const checkpoint::TensorEntry& tensor : found.manifest.tensors) {
    if (tensor.name != kTokenizer) continue;
    if (tensor.type != kernels::Scalar::u8 || tensor.shape.size() != 1 || tensor.shape[0] > storage::kLargestTokenizer)
      throw collective_error(ExitCode::data, "{}: the tensor \"{}\" is not the text of a tokeniser",
                             found.path.string(), kTokenizer);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tensor.shape[0]));
    checkpoint::Registry registry;
    registry.add(tokenizer_tensor(bytes, world.rank() == 0));
    checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);
    return Tokenizer::from_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                                fmt::format("{}, tensor \"{}\"", found.path.string(), kTokenizer));
  }
  return std::nullopt;
}

}  // namespace weft::language_model

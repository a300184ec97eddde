// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parameters/model.hpp"

#include <fmt/ranges.h>

#include "tests/test.hpp"

namespace weft::transcoder {
namespace {

using kernels::StorageType;

std::vector<checkpoint::TensorEntry> tensors(const Shape& shape, StorageType storage) {
  return model::tensors_of(parameter_specs(shape), storage, Moments::held);
}

}  // namespace

TEST_CASE("tensors of a checkpoint: names, order, types and shapes are part of the file format") {
  std::vector<std::string> lines;
  for (const checkpoint::TensorEntry& tensor : tensors({2, 300, 7}, StorageType::eight_bit))
    lines.push_back(
        fmt::format("{} {} [{}]", tensor.name, checkpoint::name_of(tensor.type), fmt::join(tensor.shape, ", ")));
  CHECK(lines == std::vector<std::string>{"encoder_0/weight bf16 [7, 300]",
                                          "encoder_0/weight.first_moment u8 [7, 300]",
                                          "encoder_0/weight.second_moment u8 [7, 300]",
                                          "encoder_0/weight.first_scale fp32 [7, 2]",
                                          "encoder_0/weight.second_scale fp32 [7, 2]",
                                          "encoder_0/bias fp32 [7]",
                                          "encoder_0/bias.first_moment fp32 [7]",
                                          "encoder_0/bias.second_moment fp32 [7]",
                                          "encoder_0/tokens_since_fired i64 [7]",
                                          "decoder_0/weight bf16 [7, 600]",
                                          "decoder_0/weight.first_moment u8 [7, 600]",
                                          "decoder_0/weight.second_moment u8 [7, 600]",
                                          "decoder_0/weight.first_scale fp32 [7, 4]",
                                          "decoder_0/weight.second_scale fp32 [7, 4]",
                                          "encoder_1/weight bf16 [7, 300]",
                                          "encoder_1/weight.first_moment u8 [7, 300]",
                                          "encoder_1/weight.second_moment u8 [7, 300]",
                                          "encoder_1/weight.first_scale fp32 [7, 2]",
                                          "encoder_1/weight.second_scale fp32 [7, 2]",
                                          "encoder_1/bias fp32 [7]",
                                          "encoder_1/bias.first_moment fp32 [7]",
                                          "encoder_1/bias.second_moment fp32 [7]",
                                          "encoder_1/tokens_since_fired i64 [7]",
                                          "decoder_1/weight bf16 [7, 300]",
                                          "decoder_1/weight.first_moment u8 [7, 300]",
                                          "decoder_1/weight.second_moment u8 [7, 300]",
                                          "decoder_1/weight.first_scale fp32 [7, 2]",
                                          "decoder_1/weight.second_scale fp32 [7, 2]",
                                          "decoder_bias fp32 [600]",
                                          "decoder_bias.first_moment fp32 [600]",
                                          "decoder_bias.second_moment fp32 [600]"});
}

TEST_CASE("elements are numbered through the encoders, then through the decoders: random streams depend on it") {
  const Shape shape{3, 4, 5};
  const std::vector<model::ParameterSpec> specs = parameter_specs(shape);
  std::vector<std::uint64_t> encoders, decoders;
  for (const model::ParameterSpec& spec : specs)
    if (spec.is_matrix()) (spec.name.starts_with("encoder") ? encoders : decoders).push_back(spec.first_element);
  CHECK(encoders == std::vector<std::uint64_t>{0, 20, 40});
  CHECK(decoders == std::vector<std::uint64_t>{60, 120, 160});
  CHECK(shape.parameters() == 3 * 20 + 60 + 40 + 20 + 3 * 5 + 12);

  const Shape per_layer{3, 4, 5, Decoder::per_layer, true};
  std::vector<std::uint64_t> skips;
  for (const model::ParameterSpec& spec : parameter_specs(per_layer))
    if (spec.name.starts_with("skip_")) skips.push_back(spec.first_element);
  CHECK(skips == std::vector<std::uint64_t>{120, 136, 152});
  CHECK(per_layer.parameters() == 2 * 3 * 20 + 3 * 5 + 12 + 3 * 16);
}

TEST_CASE("sizes and storage are derived from the tensors of a checkpoint") {
  const Shape shape{3, 4, 5};
  for (const StorageType storage : {StorageType::fp32, StorageType::bf16, StorageType::eight_bit}) {
    std::vector<checkpoint::TensorEntry> found = tensors(shape, storage);
    const std::optional<StoredModel> stored = stored_model(found);
    REQUIRE(stored);
    CHECK(stored->storage == storage);
    CHECK(stored->shape.n_layers == 3);
    CHECK(stored->shape.d_model == 4);
    CHECK(stored->shape.n_features == 5);
    const std::vector<checkpoint::TensorEntry> expected = found;
    CHECK(model::first_difference(found, expected).empty());
    found.back().shape = {13};
    CHECK(model::first_difference(found, expected) == "decoder_bias.second_moment is fp32 [13], not fp32 [12]");
    found.pop_back();
    CHECK(model::first_difference(found, expected) == "decoder_bias.second_moment is missing");
  }
  for (const Decoder decoder : {Decoder::cross_layer, Decoder::per_layer, Decoder::tied, Decoder::tied_target})
    for (const bool skip : {true, false}) {
      Shape variant{3, 4, 5, decoder, skip};
      variant.affine = decoder == Decoder::tied_target && skip;
      const std::vector<checkpoint::TensorEntry> found = tensors(variant, StorageType::fp32);
      const std::optional<StoredModel> stored = stored_model(found);
      REQUIRE(stored);
      CHECK(stored->shape.decoder == decoder);
      CHECK(stored->shape.affine == variant.affine);
      CHECK(stored->shape.skip == skip);
      CHECK(model::first_difference(found, tensors(stored->shape, StorageType::fp32)).empty());
    }
  CHECK(!stored_model(std::vector<checkpoint::TensorEntry>{{"block_0/weight", kernels::Scalar::fp32, {3, 4}}}));
}

TEST_CASE("the plan's bytes are those of a model") {
  const Shape shape{3, 24, 100};
  const parallel::Grid grid(testing::world(), parallel::data_by_feature(1, 1));
  for (const StorageType storage : {StorageType::fp32, StorageType::bf16, StorageType::eight_bit}) {
    const std::int64_t before = device::memory_use().device_bytes;
    const Model model(shape, storage, grid, testing::execution(), Moments::held);
    const model::StateBytes planned = model::largest_state_bytes(parameter_specs(shape), grid.shape(), storage,
                                                                 testing::execution().backend, Moments::held);
    CHECK(device::memory_use().device_bytes - before == planned.total());
    CHECK(model.state_bytes() == planned.weights + planned.moments);
    CHECK(model.clocks().size * 8 == planned.row_state);
  }
}

}  // namespace weft::transcoder

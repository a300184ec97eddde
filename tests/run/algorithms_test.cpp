// SPDX-License-Identifier: Apache-2.0
#include "run/algorithms.hpp"

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.hpp"
#include "kernels/language/attention/attention.hpp"
#include "tests/test.hpp"

namespace weft::testing {
namespace {

using kernels::AttentionImplementation;
using kernels::AttentionPass;

const std::string kProduct =
    R"({"n_tokens": 4, "n_features": 8, "d_model": 8, "input_stride": 8, "weight_stride": 8, "product_stride": 8,
        "input": "bf16", "product": "bf16", "alignment": 16, "gpu": "some GPU", "library": 1, "algorithm": "00",
        "workspace": 0, "milliseconds": 0.5})";

std::string attention(const std::string& implementation, int sequences) {
  return R"({"operation": "attention", "pass": "backward", "sequences": )" + std::to_string(sequences) +
         R"(, "length": 96, "heads": 8, "kv_heads": 2, "head_size": 64, "window": 0, "input": "bf16",
         "gpu": "some GPU", "library": 91900, "implementation": ")" +
         implementation + R"(", "own_milliseconds": 2.0, "cudnn_milliseconds": 1.5})";
}

kernels::Attention shape_of(std::int64_t sequences) {
  kernels::Attention shape;
  shape.sequences = sequences;
  shape.length = 96;
  shape.heads = 8;
  shape.kv_heads = 2;
  shape.head_size = 64;
  shape.scale = 0.125f;
  return shape;
}

}  // namespace

TEST_CASE("records of attention stand beside those of products; the checkpoint's come first") {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("weft_test_algorithms_" + std::to_string(world().size()) + ".json");
  std::ofstream(file) << R"({"algorithms": [)" << kProduct << ", " << attention("own", 2) << ", " << attention("own", 3)
                      << "]}";
  const std::string manifest = R"({"algorithms": [)" + attention("cudnn", 2) + "]}";
  run::use_recorded_algorithms(file.string(), world(), manifest);
  const auto record = [](AttentionPass pass, std::int64_t sequences) {
    return kernels::attention_record(kernels::attention_sizes(pass, shape_of(sequences), kernels::Scalar::bf16));
  };
  REQUIRE(record(AttentionPass::backward, 2) != nullptr);
  CHECK(record(AttentionPass::backward, 2)->implementation == AttentionImplementation::cudnn);
  CHECK(record(AttentionPass::backward, 2)->own_milliseconds == 2.0);
  REQUIRE(record(AttentionPass::backward, 3) != nullptr);
  CHECK(record(AttentionPass::backward, 3)->implementation == AttentionImplementation::own);
  CHECK(record(AttentionPass::forward, 2) == nullptr);
  CHECK(record(AttentionPass::backward, 4) == nullptr);

  // A record of a library that is not here does not change the choice, and a shape that wants the own kernels has them.
  kernels::Attention shape = shape_of(3);
  CHECK(planned_attention(AttentionPass::backward, shape, kernels::Scalar::bf16) == AttentionImplementation::own);
  shape = shape_of(2);
  shape.implementation = AttentionImplementation::own;
  CHECK(planned_attention(AttentionPass::backward, shape, kernels::Scalar::bf16) == AttentionImplementation::own);

  std::ofstream(file) << R"({"algorithms": [{"operation": "attention", "pass": "forward"}]})";
  CHECK_THROWS_WITH_AS(run::use_recorded_algorithms(file.string(), world()),
                       doctest::Contains("is not a record of algorithms"), Error);
  run::use_recorded_algorithms("", world());
  CHECK(record(AttentionPass::backward, 2) == nullptr);
  std::filesystem::remove(file);
}

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// The selection where products are filtered as they are formed, or their largest keys known (Hopper only; elsewhere the
// products are copied, with the same result).
#include "tests/gpu/select_check.hpp"

namespace weft::testing {
namespace {

/// relu where products are filtered as they are formed, with cuts or with biases of the same effect. Few entries, but
/// in one layer all tokens of some features: more than the lists of the kernel's threads hold.
void check_few_above(const Sizes& sizes, std::int64_t d, bool with_bounds) {
  Factors factors("random", sizes, d, 31);
  Random random{5};
  for (std::int64_t l = 0; l < sizes.layers; ++l) {
    std::vector<float> cut;
    for (std::int64_t f = 0; f < sizes.features; ++f)
      cut.push_back(l == 0 && f < 50 ? -1e6f : 14000.0f * (1 + random.uniform()));
    if (with_bounds)
      factors.input.cut.push_back(cut);
    else
      for (std::size_t f = 0; f < cut.size(); ++f) factors.input.bias[static_cast<std::size_t>(l)][f] = -cut[f];
  }
  SelectionRequest request = request_of(SelectionRule::relu, true, sizes, 0, Scalar::bf16);
  request.budget /= 32;
  check_selection(request, sizes, factors.input, &factors.operands);
}

TEST_CASE("small: products that are filtered as they are formed; run by compute-sanitizer") {
  // Two tiles of features, one cluster with a block without tokens; one tie fills all batches of a tile.
  const Sizes sizes{70, 2, 260};
  for (const char* name : {"random", "all equal"}) {
    const Factors factors(name, sizes, 200, 31);
    SelectionRequest request = request_of(SelectionRule::batch_topk, false, sizes, 5.3, Scalar::bf16);
    check_selection(request, sizes, factors.input, &factors.operands);
  }
  check_few_above({70, 3, 601}, 200, true);
}

TEST_CASE("small: products of which the largest keys are known; run by compute-sanitizer") {
  const Sizes sizes{70, 2, 260};
  const Factors factors("random", sizes, 200, 31);
  check_selection(request_of(SelectionRule::topk, false, sizes, 2, Scalar::bf16), sizes, factors.input,
                  &factors.operands);
}

TEST_CASE("batch_topk equals a full sort where products are filtered as they are formed") {
  // Sizes: ends of tiles in every direction, more layers than a launch takes, tiles of a repeated pass with several
  // segments.
  struct Case {
    Sizes sizes;
    std::int64_t d, tile_features;
  };
  for (const Case& each : {Case{{300, 2, 1000}, 328, 512}, Case{{1, 2, 256}, 256, 0}, Case{{65, 34, 257}, 200, 0},
                           Case{{260, 1, 2052}, 384, 0}})
    for (const char* name : {"random", "ties", "all equal", "dense rows", "extreme"}) {
      const Factors factors(name, each.sizes, each.d, 31);
      for (const bool all_layers : {false, true}) {
        SelectionRequest request = request_of(SelectionRule::batch_topk, all_layers, each.sizes, 5.3, Scalar::bf16);
        request.tile_features = each.tile_features;
        check_selection(request, each.sizes, factors.input, &factors.operands);
      }
    }
}

TEST_CASE("topk where the kernel that forms the products finds the largest keys of a row's parts") {
  struct Case {
    Sizes sizes;
    std::int64_t d, tile_tokens;
  };
  for (const Case& each : {Case{{300, 2, 1000}, 328, 100}, Case{{1, 2, 256}, 256, 0}, Case{{65, 3, 257}, 200, 0},
                           Case{{70, 2, 9003}, 384, 0}})
    for (const char* name : {"random", "ties", "all equal", "dense rows", "extreme"}) {
      const Factors factors(name, each.sizes, each.d, 31);
      for (const double k : {2.0, 30.0})
        for (const bool all_layers : {false, true}) {
          SelectionRequest request = request_of(SelectionRule::topk, all_layers, each.sizes, k, Scalar::bf16);
          request.tile_tokens = each.tile_tokens;
          check_selection(request, each.sizes, factors.input, &factors.operands);
        }
    }
}

TEST_CASE("relu and thresholds of features where products are filtered as they are formed") {
  for (const auto& [sizes, d] : {std::pair{Sizes{300, 2, 1000}, 328}, {Sizes{65, 34, 260}, 200}})
    for (const bool with_bounds : {false, true}) {
      CAPTURE(with_bounds);
      check_few_above(sizes, d, with_bounds);
    }
}

// ---- the ranks of a grid, on one GPU -------------------------------------------------------------------------------

}  // namespace
}  // namespace weft::testing

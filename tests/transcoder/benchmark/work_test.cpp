// SPDX-License-Identifier: Apache-2.0
#include "transcoder/benchmark/work.hpp"

#include <doctest/doctest.h>

namespace weft::transcoder {

TEST_CASE("the work of a step, by hand for two layers") {
  StepSizes sizes;
  sizes.shape = {2, 10, 30};
  sizes.n_features = 30;
  sizes.group_tokens = sizes.own_tokens = 5;
  sizes.entries = 7;
  sizes.entry_columns = 100;
  // Encoder 2 * 30 * 10 = 600 parameters, decoder 30 * 10 * 3 = 900.
  CHECK(work_of("encode", Formulation::sparse, sizes).flops == 2 * 5 * 600);
  CHECK(work_of("decode", Formulation::dense, sizes).flops == 2 * 5 * 900);
  CHECK(work_of("decoder backward", Formulation::dense, sizes).flops == 2 * (2 * 5 * 900));
  CHECK(work_of("encoder backward", Formulation::dense, sizes).flops == 2 * 5 * 600);
  // w, m and v are read and written; the dense optimizer reads a gradient as well.
  CHECK(work_of("decoder backward", Formulation::sparse, sizes).bytes == 900 * 24 + 5 * 20 * 4 + 7 * 12);
  CHECK(work_of("optimizer", Formulation::dense, sizes).bytes == 1500 * 28);
  CHECK(work_of("decode", Formulation::sparse, sizes).bytes == 100 * 4 + 5 * 20 * 4);
  CHECK(work_of("exchange", Formulation::sparse, sizes).bytes == 0);
  // Pre-activations are written and read, unless they are filtered as they are formed.
  CHECK(work_of("encode", Formulation::sparse, sizes).bytes == 600 * 4 + 5 * 20 * 4 + 5 * 60 * 4);
  CHECK(work_of("select", Formulation::sparse, sizes).bytes == 5 * 60 * 4 + 7 * 16);
  sizes.stores_products = false;
  CHECK(work_of("encode", Formulation::sparse, sizes).bytes == 600 * 4 + 5 * 20 * 4);
  CHECK(work_of("select", Formulation::sparse, sizes).bytes == 7 * 16);
}

}  // namespace weft::transcoder

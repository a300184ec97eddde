// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/step_work.hpp"

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
  CHECK(work_of("encode", sizes).flops == 2 * 5 * 600);
  // w, m and v are read and written.
  CHECK(work_of("decoder backward", sizes).bytes == 900 * 24 + 5 * 20 * 4 + 7 * 12);
  CHECK(work_of("decode", sizes).bytes == 100 * 4 + 5 * 20 * 4);
  CHECK(work_of("exchange", sizes).bytes == 0);
  // Pre-activations are written and read, unless they are filtered as they are formed.
  CHECK(work_of("encode", sizes).bytes == 600 * 4 + 5 * 20 * 4 + 5 * 60 * 4);
  CHECK(work_of("select", sizes).bytes == 5 * 60 * 4 + 7 * 16);
  sizes.stores_products = false;
  CHECK(work_of("encode", sizes).bytes == 600 * 4 + 5 * 20 * 4);
  CHECK(work_of("select", sizes).bytes == 7 * 16);
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// A case that ends early on one of several ranks ends the program (tests/main.cpp): the others wait for that rank. This
// program fails; ctest looks for the message.
#include "base/error.hpp"
#include "tests/test.hpp"

namespace weft::parallel {

TEST_CASE("a case that one rank leaves") {
  if (testing::world().rank() == 1) throw error(ExitCode::internal, "as planned");
  testing::world().all().barrier();
  testing::world().all().barrier();
}

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
#include "commands/report/language_model/part.hpp"
#include "commands/report/page.hpp"
#include "commands/report/transcoder/part.hpp"

namespace weft::commands {

const std::vector<Family>& families() {
  static const std::vector<Family> all = {{"transcoder", transcoder_part}, {"language_model", language_model_part}};
  return all;
}

}  // namespace weft::commands

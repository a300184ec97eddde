// SPDX-License-Identifier: Apache-2.0
//
// weft report RUN: one HTML page of a run.
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/report/facts.hpp"
#include "commands/report/page.hpp"
#include "storage/durable.hpp"

namespace weft::commands {

int report(const Request& request, const parallel::World& world) {
  const RunFacts facts = gather_facts(request.subject, world);
  world.on_root([&]() -> std::string {
    const std::filesystem::path page = request.output.empty() ? std::filesystem::path(request.subject) / "report.html"
                                                              : std::filesystem::path(request.output);
    storage::write_text_atomically(page, report_page(facts));
    log::info("{}: open it in a browser", page.string());
    return {};
  });
  return 0;
}

}  // namespace weft::commands

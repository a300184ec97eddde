// SPDX-License-Identifier: Apache-2.0
//
// weft report RUN: one HTML page of a run. weft report RUN RUN …: one page that compares runs.
#include "base/json.hpp"
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/report/comparison.hpp"
#include "commands/report/facts.hpp"
#include "commands/report/page.hpp"
#include "storage/durable.hpp"

namespace weft::commands {
namespace {

/// Throws Error(usage) if no file can be there.
void write_page(const std::filesystem::path& page, const std::string& text) {
  const std::filesystem::path directory = page.has_parent_path() ? page.parent_path() : ".";
  if (!std::filesystem::is_directory(directory))
    throw error(ExitCode::usage, "--output {}: {} is no directory; create it, or name a file elsewhere", page.string(),
                directory.string());
  if (std::filesystem::is_directory(page))
    throw error(ExitCode::usage, "--output {}: is a directory (the page is a file); name a file, as {}", page.string(),
                (page / "report.html").string());
  if (std::filesystem::exists(page) && !std::filesystem::is_regular_file(page))  // it would be replaced
    throw error(ExitCode::usage, "--output {}: is a device or FIFO (the page is a file); name a file", page.string());
  storage::write_text_atomically(page, text);
}

/// Collective.
int report_comparison(const Request& request, const parallel::World& world) {
  world.on_root([&]() -> std::string {
    std::vector<RunFacts> runs;
    for (const std::string& path : request.files) runs.push_back(read_files(path));
    const Comparison comparison = compare(std::move(runs));
    const std::filesystem::path page = request.output.empty() ? "comparison.html" : request.output;
    write_page(page, comparison_page(comparison));
    log::info("{}: open it in a browser", page.string());
    Json document = to_json(comparison);
    document["page"] = page.string();
    print_result(request, to_text(comparison), document);
    return {};
  });
  return 0;
}

}  // namespace

int report(const Request& request, const parallel::World& world) {
  if (request.files.size() > 1) return report_comparison(request, world);
  const RunFacts facts = gather_facts(request.subject, world);
  world.on_root([&]() -> std::string {
    const std::filesystem::path page = request.output.empty() ? std::filesystem::path(request.subject) / "report.html"
                                                              : std::filesystem::path(request.output);
    write_page(page, report_page(facts));
    print_written(request, page.string() + ": open it in a browser", {{"page", page.string()}});
    return {};
  });
  return 0;
}

}  // namespace weft::commands

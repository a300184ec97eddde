// SPDX-License-Identifier: Apache-2.0
//
// A run without arithmetic, for tests that kill it or take its power away.
//
// checkpoint_driver DIRECTORY STEPS EVERY [small] [from=STEP_DIRECTORY]
//   Resumes from the newest checkpoint, compares it bit for bit with the expected state, and writes checkpoints up to
//   STEPS. Prints the step at which it began, and "durable STEP" for each checkpoint; exits with 9 if a checkpoint has
//   wrong bits. small: a state of some 100 kB. from: resumes from this checkpoint of DIRECTORY and leaves the newer
//   ones in their places, so that they are replaced.
// checkpoint_driver check
//   For each line "DIRECTORY [STEP...]" of standard input: the newest valid checkpoint is loaded, these are valid too,
//   and another one is written after it. Answers with one line: "from STEP" (-1: there is none) or what is wrong.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <string>

#include "base/log.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "device/runtime.hpp"
#include "parallel/world.hpp"
#include "storage/durable.hpp"
#include "tests/checkpoint/sample.hpp"

namespace {

using namespace weft;
namespace fs = std::filesystem;
using checkpoint::testing::Sample;

constexpr std::int64_t kWide = 300'001, kNarrow = 3'001;

/// At once and by one system call: it is part of the record of a run (tests/fault/powerloss).
void print(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) < 0) std::abort();
}

/// Throws unless the checkpoint has the expected bits.
void require_bits(const parallel::World& world, const checkpoint::Found& found, Sample& sample,
                  const kernels::Execution& execution) {
  sample.clear();
  checkpoint::load(world.all(), found, sample.registry, execution);
  if (!sample.holds(found.manifest.step))
    throw collective_error(static_cast<ExitCode>(9), "{}: has wrong bits", found.path.string());
}

/// Returns the step of the newest checkpoint of `directory`; -1 if there is none.
std::int64_t check(const parallel::World& world, const fs::path& directory, std::istream& published,
                   const kernels::Execution& execution) {
  Sample sample(world.all(), 1, kNarrow);
  const auto found = checkpoint::find(world.all(), directory, "auto", checkpoint::Verify::full);
  if (found) require_bits(world, *found, sample, execution);
  for (std::int64_t step; published >> step;)
    require_bits(world,
                 checkpoint::open(world.all(), directory / checkpoint::directory_name(step), checkpoint::Verify::full),
                 sample, execution);
  const std::int64_t next = found ? found->manifest.step + 1 : 1;
  {
    checkpoint::Writer writer(world.all(), directory, {}, sample.registry, execution, found ? found->path : "");
    sample.fill(next);
    writer.start(checkpoint::testing::manifest_of(next));
    const auto report = writer.finish();
    if (!report->durable) throw collective_error(ExitCode::io, "{}", report->line());
  }
  const auto later = checkpoint::find(world.all(), directory, "auto", checkpoint::Verify::full);
  if (!later || later->manifest.step != next)
    throw collective_error(ExitCode::io, "the checkpoint of step {} was written and is not found", next);
  require_bits(world, *later, sample, execution);
  return found ? found->manifest.step : -1;
}

void check_all(const parallel::World& world, const kernels::Execution& execution) {
  log::set_sink([](log::Level, std::string_view) {});
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string directory;
    words >> directory;
    try {
      print(fmt::format("from {}", check(world, directory, words, execution)));
    } catch (const std::exception& failure) {
      print(failure.what());
    }
  }
}

void run(const parallel::World& world, const kernels::Execution& execution, int argc, char** argv, std::int64_t& step) {
  const fs::path directory = argv[1];
  const std::int64_t steps = std::atoll(argv[2]), every = std::atoll(argv[3]);
  std::int64_t wide = kWide;
  std::string resume = "auto";
  for (int i = 4; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "small") wide = kNarrow;
    if (word.starts_with("from=")) resume = word.substr(5);
  }
  Sample sample(world.all(), 1, wide);
  const auto found = checkpoint::find(world.all(), directory, resume, checkpoint::Verify::full);
  if (found) require_bits(world, *found, sample, execution);
  step = found ? found->manifest.step : 0;
  if (world.is_root()) print(fmt::format("from {}", step));
  checkpoint::Writer writer(world.all(), directory, {}, sample.registry, execution, found ? found->path : "");
  if (resume != "auto" && world.is_root())
    for (std::int64_t later = step + 1; later <= steps; ++later) {
      const fs::path path = directory / checkpoint::directory_name(later), aside = path.string() + ".abandoned";
      if (!fs::exists(aside)) continue;
      storage::rename_durably(aside, path);
      print(fmt::format("durable {}", later));
    }
  const auto note = [&](const std::optional<checkpoint::Report>& report) {
    if (report && report->durable && world.is_root()) print(fmt::format("durable {}", report->step));
  };
  while (step < steps) {
    ++step;
    sample.fill(step);
    note(writer.poll());
    if (step % every != 0) continue;
    note(writer.finish());
    writer.start(checkpoint::testing::manifest_of(step));
  }
  note(writer.finish());
}

}  // namespace

int main(int argc, char** argv) {
  parallel::World world(&argc, &argv);
  std::int64_t step = -1;
  try {
    const device::Runtime runtime({}, world.node_rank(), world.node_size());
    if (argc == 2 && std::string_view(argv[1]) == "check")
      check_all(world, runtime.execution());
    else if (argc >= 4)
      run(world, runtime.execution(), argc, argv, step);
    else
      throw collective_error(ExitCode::usage, "see the first lines of driver.cpp");
  } catch (const Error& failure) {
    return parallel::end_run(world, failure, step);
  }
  return parallel::agreed_exit_code(world, 0);
}

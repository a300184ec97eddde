// SPDX-License-Identifier: Apache-2.0
//
// linear_regression INPUT OUTPUT: a command for the smallest model, made of the same parts as weft train.
#include "tests/training/linear_regression.hpp"

#include "base/log.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "optimizer/settings.hpp"
#include "parallel/failure.hpp"
#include "parallel/settings.hpp"
#include "report/log.hpp"
#include "report/run_record.hpp"
#include "training/loop.hpp"

namespace {

using namespace weft;

struct Configuration {
  training::RunSettings run;
  optimizer::Settings optimizer;
  parallel::Settings parallel;
  checkpoint::Settings checkpoint;
  training::LogSettings log;
  training::ResumeSettings resume;
};

int train(const std::string& path, const std::string& output, const parallel::World& world) {
  const auto start = std::chrono::steady_clock::now();
  Configuration c;
  input::Schema schema;
  training::add_keys(schema, c.run);
  optimizer::add_keys(schema, c.optimizer);
  parallel::add_keys(schema, c.parallel);
  checkpoint::add_keys(schema, c.checkpoint);
  training::add_keys(schema, c.log);
  training::add_keys(schema, c.resume);
  const std::string text = world.on_root([&] { return input::load_text(path); });
  input::read(schema, text, path, {input::override_text("run.output", output, "OUTPUT")});
  parallel::set_timeout(c.parallel.timeout);

  training::accept_requests();
  const training::OpenedRun opened = training::open_run(c.run, schema, "auto", c.checkpoint, false, world);
  if (opened.found) training::check_same_run(schema, c.resume, *opened.found, {"examples", "generated"}, world);
  if (training::is_complete(opened, c.run, world)) return 0;
  training::keep_input(opened, schema, world);
  const device::Runtime runtime({}, world.node_rank(), world.node_size());
  report::record_start(world, "linear_regression", {}, runtime.description());

  const parallel::GridShape shape({{std::string(parallel::kDataAxis), world.size()}});
  const parallel::Grid grid(world, shape);
  testing::LinearRegression model(grid, static_cast<std::uint64_t>(c.run.seed), c.optimizer.learning_rate);
  training::Loop loop(model, {c.run, c.log, c.resume, c.checkpoint}, {input::print(schema), text, {}, "generated"},
                      opened, world, shape, runtime, start);
  return loop.run();
}

}  // namespace

int main(int argc, char** argv) {
  const parallel::World world(&argc, &argv);
  const report::LogSession log(world.rank());
  try {
    if (argc != 3) throw collective_error(ExitCode::usage, "linear_regression INPUT OUTPUT");
    const int code = parallel::agreed_exit_code(world, train(argv[1], argv[2], world));
    if (world.is_root()) report::record_end(code, report::exit_reason(code));
    return code;
  } catch (const Error& failure) {
    if (world.is_root() || failure.known_to() == KnownTo::one_rank)
      report::record_end(static_cast<int>(failure.code()), failure.what());
    return parallel::end_run(world, failure, report::current_step());
  }
}

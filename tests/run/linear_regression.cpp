// SPDX-License-Identifier: Apache-2.0
//
// linear_regression INPUT OUTPUT: a command for the smallest model, made of the same parts as weft train.
#include "tests/run/linear_regression.hpp"

#include "base/log.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "optimizer/optimizer_settings.hpp"
#include "parallel/failure.hpp"
#include "parallel/parallel_settings.hpp"
#include "run/log_session.hpp"
#include "run/loop.hpp"
#include "run/run_record.hpp"

namespace {

using namespace weft;

struct Configuration {
  run::RunSettings run;
  optimizer::Settings optimizer;
  parallel::Settings parallel;
  checkpoint::Settings checkpoint;
  run::LogSettings log;
  run::ResumeSettings resume;
};

int train(const std::string& path, const std::string& output, const parallel::World& world) {
  const auto start = std::chrono::steady_clock::now();
  Configuration c;
  input::Schema schema;
  run::add_keys(schema, c.run);
  optimizer::add_keys(schema, c.optimizer);
  parallel::add_keys(schema, c.parallel);
  checkpoint::add_keys(schema, c.checkpoint);
  run::add_keys(schema, c.log);
  run::add_keys(schema, c.resume);
  const std::string text = world.on_root([&] { return input::load_text(path); });
  input::read(schema, text, path, {input::override_text("run.output", output, "OUTPUT")});
  parallel::set_timeout(c.parallel.timeout);

  run::accept_requests();
  const run::OpenedRun opened = run::open_run(c.run, schema, "auto", c.checkpoint, false, world);
  if (opened.found) run::check_same_run(schema, c.resume, *opened.found, {"examples", "generated"}, world);
  if (run::is_complete(opened, c.run, world)) return 0;
  run::keep_input(opened, schema, world);
  const device::Runtime runtime({}, world.node_rank(), world.node_size());
  run::record_start(world, "linear_regression", {}, runtime.description());

  const parallel::GridShape shape({{std::string(parallel::kDataAxis), world.size()}});
  const parallel::Grid grid(world, shape);
  testing::LinearRegression model(grid, static_cast<std::uint64_t>(c.run.seed), c.optimizer.learning_rate);
  run::Loop loop(model, {c.run, c.log, c.resume, c.checkpoint}, {input::print(schema), text, {}, "generated"}, opened,
                 world, shape, runtime, start);
  return loop.run();
}

}  // namespace

int main(int argc, char** argv) {
  const parallel::World world(&argc, &argv);
  const run::LogSession log(world.rank());
  try {
    if (argc != 3) throw collective_error(ExitCode::usage, "linear_regression INPUT OUTPUT");
    const int code = parallel::agreed_exit_code(world, train(argv[1], argv[2], world));
    if (world.is_root()) run::record_end(code, run::exit_reason(code));
    return code;
  } catch (const Error& failure) {
    if (world.is_root() || failure.known_to() == KnownTo::one_rank)
      run::record_end(static_cast<int>(failure.code()), failure.what());
    return parallel::end_run(world, failure, run::current_step());
  }
}

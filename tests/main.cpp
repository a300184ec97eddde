// SPDX-License-Identifier: Apache-2.0
//
// The main of every test program: MPI and the arithmetic are up before the first case. On several ranks all run the
// same cases; any rank's failure fails the program. The kernels of OpenBLAS are those that weft uses.
// WEFT_TEST_BACKEND: device.backend, for tests in fp32, which in a CUDA build take the portable kernels.
#include <cstdlib>
#include <iostream>
#include <map>

#include "base/log.hpp"
#include "device/host_program.hpp"
#include "shared_grid.hpp"
#include "test.hpp"

namespace weft::testing {
namespace {
const parallel::World* current_world = nullptr;
const device::Runtime* current_runtime = nullptr;
std::map<std::string, std::shared_ptr<const parallel::Grid>> grids;  // of all ranks, by shape

/// Ends the job when a case ends early on one of several ranks: the others would wait for it in their next exchange.
class EarlyEnd : public doctest::IReporter {
 public:
  explicit EarlyEnd(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& data) override { name_ = data.m_name; }
  void test_case_exception(const doctest::TestCaseException& exception) override {
    if (!exception.is_crash) end(exception.error_string.c_str());  // of a signal the launcher learns
  }
  void log_assert(const doctest::AssertData& data) override {
    const bool ends_case = (data.m_at & doctest::assertType::is_require) != 0;
    if (data.m_failed && ends_case) end(fmt::format("{}:{}: {}", data.m_file, data.m_line, data.m_expr));
  }

  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_message(const doctest::MessageData& data) override {
    if ((data.m_severity & doctest::assertType::is_require) != 0)
      end(fmt::format("{}:{}: {}", data.m_file, data.m_line, data.m_string.c_str()));
  }
  void test_case_skipped(const doctest::TestCaseData&) override {}

 private:
  void end(const std::string& why) const {
    if (world().size() == 1) return;
    for (int i = 0; i < get_num_active_contexts(); ++i) {
      get_active_contexts()[i]->stringify(&std::cerr);
      std::cerr << '\n';
    }
    log::error("rank {} left the case \"{}\": {}", world().rank(), name_, why);
    parallel::abort_job(ExitCode::internal);
  }

  const char* name_ = "";
};
DOCTEST_REGISTER_LISTENER("early_end", 1, EarlyEnd);

}  // namespace
const parallel::World& world() { return *current_world; }
const kernels::Execution& execution() { return current_runtime->execution(); }
std::shared_ptr<const parallel::Grid> shared_grid(const parallel::Communicator& ranks,
                                                  const parallel::GridShape& shape) {
  if (&ranks != &world().all()) return std::make_shared<parallel::Grid>(ranks, shape);
  std::shared_ptr<const parallel::Grid>& grid = grids[shape.text()];
  if (!grid) grid = std::make_shared<parallel::Grid>(ranks, shape);
  return grid;
}
}  // namespace weft::testing

int main(int argc, char** argv) {
  weft::device::restart_with_blas_core(argv);
  weft::parallel::World world(&argc, &argv);
  weft::parallel::set_timeout(0);  // ctest has one, and cases need not report progress
  weft::device::Settings settings;
  if (const char* const backend = std::getenv("WEFT_TEST_BACKEND")) settings.backend = backend;
  const weft::device::Runtime runtime(settings, world.node_rank(), world.node_size());
  weft::testing::current_world = &world;
  weft::testing::current_runtime = &runtime;
  std::cout << std::unitbuf;  // if ctest ends this process, its log has all that was printed
  doctest::Context context(argc, argv);
  const int code = context.run();
  weft::testing::grids.clear();  // while MPI and the GPU are in use
  return weft::parallel::agreed_exit_code(world, code);
}

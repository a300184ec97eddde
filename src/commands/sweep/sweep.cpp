// SPDX-License-Identifier: Apache-2.0
//
// weft sweep INPUT --grid KEY=VALUES … --output DIR: trains INPUT at every point of a grid, as processes of this
// program or as an array of jobs, and compares the results. A second start skips finished points and resumes the
// others.
//
//   DIR/NAME.toml   the resolved input of a point      DIR/NAME/   its run      DIR/NAME.log   its output
//   DIR/sweep.{csv,json,html}   the comparison         DIR/points.txt, DIR/sweep.job   what is submitted
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "base/log.hpp"
#include "base/progress.hpp"
#include "base/system.hpp"
#include "commands/commands.hpp"
#include "commands/report/comparison.hpp"
#include "commands/sweep/grid.hpp"
#include "commands/sweep/processes.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "parallel/launcher.hpp"
#include "parallel/signals.hpp"
#include "report/run_record.hpp"
#include "storage/durable.hpp"

namespace weft::commands {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto kPoll = 50ms;

/// A point with its run.
struct Job {
  Point point;
  fs::path run, input, log;
  std::string resolved = {};  // the text of `input`
  std::int64_t threads = 0;   // device.threads; 0 = as many as this process may use
  bool finished = false;
  int code = -1;  // of this start; -1: not started
};

bool of_language_model(const Request& request) { return input::has_table(request.input_text, "language_model"); }

/// Exit code 0, and as many steps as the input asks for.
bool is_finished(const fs::path& run, std::int64_t steps) {
  const report::Json record = report::stored_record(run / "run.json");
  return report::exit_code_of(record) == 0 && number(member(record, {"result", "step"})) >= static_cast<double>(steps);
}

/// Resolves and checks the input of every point, then writes them. Collective.
std::vector<Job> prepare(const Request& request, const parallel::World& world) {
  std::vector<Job> jobs;
  for (Point& point : points_of(parse_grid(request.grid))) {
    const fs::path run = fs::path(request.output) / point.name;
    Job& job = jobs.emplace_back(Job{point, run, run.string() + ".toml", run.string() + ".log"});
    Request own = request;
    own.point = point.sets;
    own.output = run.string();
    Input input;
    const input::Schema keys = schema(input, of_language_model(request) ? Command::lm_train : Command::train);
    read_input(own, keys, world);
    world.on_root([&]() -> std::string {
      const fs::path earlier = run / "input.toml";
      std::string changed;
      if (fs::exists(earlier))
        for (const input::Change& change :
             input::changed_keys(keys, storage::read_text(earlier, input::kLargestInput), earlier.string()))
          changed += fmt::format("\n  {} was {}, now {}", change.path, change.before, change.after);
      if (!changed.empty())
        throw error(ExitCode::usage,
                    "{}: was trained with another input:{}\nrestore it, or start another sweep with another --output",
                    run.string(), changed);
      job.finished = is_finished(run, std::get<std::int64_t>(keys.find("run.steps")->load()));
      job.resolved = input::print(keys);
      job.threads = std::get<std::int64_t>(keys.find("device.threads")->load());
      return {};
    });
  }
  world.on_root([&]() -> std::string {
    if (request.dry_run) return {};
    storage::make_directory(request.output);
    for (const Job& job : jobs) storage::write_text_atomically(job.input, job.resolved);
    return {};
  });
  return jobs;
}

std::vector<std::string> command_of(const Request& request, const Job& job) {
  std::vector<std::string> words = {own_program().string()};
  if (of_language_model(request)) words.emplace_back("lm");
  for (const std::string& word : {std::string("train"), job.input.string(), std::string("--output"), job.run.string()})
    words.push_back(word);
  // Processes side by side share the cores.
  const std::int64_t cores = usable_cpus();
  if (request.jobs > 1 && job.threads == 0 && device::requested_threads({}) == 0)
    words.push_back(fmt::format("--set=device.threads={}", std::max<std::int64_t>(1, cores / request.jobs)));
  return words;
}

/// Runs what is not finished, at most request.jobs at a time. Returns the exit code of a requested stop; 0 = none.
int run_jobs(const Request& request, std::vector<Job>& jobs) {
  const parallel::Signals signals;
  struct Slot {
    Job* job = nullptr;
    pid_t process = 0;
  };
  std::vector<Slot> slots(static_cast<std::size_t>(request.jobs));
  std::size_t next = 0, running = 0, ended_jobs = 0;
  const auto left =
      static_cast<std::size_t>(std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return !job.finished; }));
  int stop = 0;
  while (true) {
    note_progress();  // each run has a watchdog of its own
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      if (slot.job != nullptr) {
        const int code = ended(slot.process);
        if (code < 0) continue;
        slot.job->code = code;
        slot.job->finished = code == 0;
        --running;
        ++ended_jobs;
        if (code == 0)
          log::info("[{}/{}] {}: finished", ended_jobs, left, slot.job->point.name);
        else
          log::warning("[{}/{}] {}: {} (exit code {}); see {}", ended_jobs, left, slot.job->point.name,
                       report::exit_reason(code), code, slot.job->log.string());
        slot.job = nullptr;
      }
      while (next < jobs.size() && jobs[next].finished) ++next;
      if (stop != 0 || next == jobs.size()) continue;
      Job& job = jobs[next++];
      std::vector<std::string> variables = gpu_of_slot(i);
      variables.push_back(tied_to_this_process());
      try {
        slot.process = start_process(command_of(request, job), variables, job.log);
      } catch (const Error& failure) {  // as a point that fails: the others go on
        job.code = static_cast<int>(failure.code());
        ++ended_jobs;
        log::warning("[{}/{}] {}: {}", ended_jobs, left, job.point.name, failure.what());
        continue;
      }
      slot.job = &job;
      ++running;
      log::info("{}: started", job.point.name);
    }
    if (running == 0 && (stop != 0 || next == jobs.size())) return stop;
    if (const auto requested = static_cast<int>(parallel::Signals::requested().stop); requested != 0 && stop == 0) {
      stop = requested;
      log::info("stopping: each run writes a checkpoint; the same command continues the sweep");
      for (const Slot& slot : slots)
        if (slot.job != nullptr) kill(slot.process, stop == static_cast<int>(ExitCode::requeue) ? SIGUSR1 : stop - 128);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

std::string quoted_for_shell(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

/// A shipped job script: in the repository, or where the program is installed.
fs::path shipped_script(const std::string& name) {
  const fs::path here = fs::path("jobscripts") / name;
  const fs::path installed = own_program().parent_path().parent_path() / "share/weft/jobscripts" / name;
  return !fs::exists(here) && fs::exists(installed) ? installed : here;
}

/// The job script with the lines that take input and run of its array index from points.txt.
std::string job_script(const Request& request, const fs::path& points) {
  const fs::path path =
      !request.script.empty() ? fs::path(request.script) : shipped_script(request.slurm ? "slurm.sbatch" : "pbs.pbs");
  if (!fs::is_regular_file(path))
    throw error(ExitCode::usage, "{}: no such file (the job script of this site); name it with --script",
                path.string());
  std::string text = storage::read_text(path, std::int64_t{1} << 20);
  const std::string place = quoted_for_shell(fs::absolute(points).string());
  const std::string added =
      request.slurm
          ? "# weft sweep: the input and the run directory of this point.\n"
            "eval \"set -- $(sed -n \"$((SLURM_ARRAY_TASK_ID + 1))p\" " +
                place + ")\"\n"
          : "# weft sweep: the input and the run directory of this point; a resubmitted job has them already.\n"
            "if [[ -n ${PBS_ARRAY_INDEX:-} ]]; then\n"
            "  eval \"set -- $(sed -n \"$((PBS_ARRAY_INDEX + 1))p\" " +
                place +
                ")\"\n"
                "  export WEFT_INPUT=$1 WEFT_RUN=$2\n  shift 2\nfi\n" +
                (of_language_model(request) ? "export WEFT_COMMAND='lm train'\n" : "");
  // After the header of comments, whose directives end at the first command.
  std::size_t at = 0;
  while (at < text.size() && (text[at] == '#' || text[at] == '\n')) at = std::min(text.size(), text.find('\n', at)) + 1;
  if (at > text.size()) throw error(ExitCode::usage, "{}: has no command; is it a job script?", path.string());
  text.insert(at, added);
  if (of_language_model(request) && text.find("${command[@]}") == std::string::npos)
    throw error(ExitCode::usage,
                "{}: has no \"${{command[@]}}\" (a language model needs a script that starts the command that it is "
                "given, here lm train); take a shipped script",
                path.string());
  return text;
}

/// Submits what is not finished as one array of jobs.
void submit(const Request& request, const std::vector<Job>& jobs) {
  const fs::path points = fs::path(request.output) / "points.txt", script = fs::path(request.output) / "sweep.job";
  std::string lines;
  std::size_t n = 0;
  for (const Job& job : jobs)
    if (!job.finished) {
      lines += (request.slurm && of_language_model(request) ? "lm train " : "") + quoted_for_shell(job.input.string()) +
               " " + quoted_for_shell(job.run.string()) + "\n";
      ++n;
    }
  storage::write_text_atomically(script, job_script(request, points));
  storage::write_text_atomically(points, lines);
  const std::string throttle = request.jobs > 1 ? fmt::format("%{}", request.jobs) : "";
  std::vector<std::string> command = {"sbatch", fmt::format("--array=0-{}{}", n - 1, throttle), script.string()};
  // PBS has no array of one job; its index is then a variable of the submission.
  if (request.pbs && n > 1) command = {"qsub", "-J", fmt::format("0-{}{}", n - 1, throttle), script.string()};
  if (request.pbs && n == 1) command = {"qsub", "-v", "PBS_ARRAY_INDEX=0", script.string()};
  if (const int code = wait_for(start_process(command, {}, "")); code != 0)
    throw error(ExitCode::usage, "{} ended with {} (its message is above); {} can be submitted by hand", command[0],
                code, script.string());
  print_result(request, fmt::format("{} points submitted; when they have ended, the same command writes the table", n),
               {{"directory", request.output}, {"submitted", n}});
}

/// Of a dry run, and if no point has a result.
void print_points(const Request& request, const std::vector<Job>& jobs) {
  std::string text;
  Json points = Json::array();
  for (const Job& job : jobs) {
    text += fmt::format("{}{}{}", text.empty() ? "" : "\n", job.run.string(), job.finished ? ": finished" : "");
    points.push_back({{"name", job.point.name}, {"path", job.run.string()}, {"finished", job.finished}});
  }
  print_result(request, text, {{"directory", request.output}, {"points", std::move(points)}});
}

/// The table of all points that have run, and the files of the comparison.
void conclude(const Request& request, const std::vector<Job>& jobs) {
  std::vector<RunFacts> runs;
  for (const Job& job : jobs)
    if (fs::exists(job.run / "run.json"))
      if (RunFacts facts = read_files(job.run); family_of(facts) != nullptr) runs.push_back(std::move(facts));
  if (runs.empty()) return print_points(request, jobs);
  const fs::path directory = request.output;
  const Comparison comparison = compare(std::move(runs));
  storage::write_text_atomically(directory / "sweep.csv", to_csv(comparison));
  report::write_json(directory / "sweep.json", to_json(comparison));
  storage::write_text_atomically(directory / "sweep.html", comparison_page(comparison));
  log::info("results in {}: sweep.csv, sweep.json, sweep.html", directory.string());
  Json document = to_json(comparison);
  document["directory"] = directory.string();
  print_result(request, to_text(comparison), document);
}

}  // namespace

int sweep(const Request& request, const parallel::World& world) {
  // 1. The points, each with its resolved input.
  if (world.size() > 1 || parallel::started_by_launcher())
    throw collective_error(ExitCode::usage,
                           "weft sweep starts the processes itself (it was started by mpirun or srun); start it "
                           "without a launcher");
  if (request.grid.empty() || request.output.empty())
    throw collective_error(ExitCode::usage, "weft sweep needs {}; see weft sweep --help",
                           request.grid.empty() ? "--grid table.key=VALUE,VALUE" : "--output DIR");
  if (request.slurm && request.pbs)
    throw collective_error(ExitCode::usage, "--slurm and --pbs exclude each other; give one of them");
  if (!request.script.empty() && !request.slurm && !request.pbs)
    throw collective_error(ExitCode::usage, "--script {} without --slurm or --pbs (nothing is submitted); give one",
                           request.script);
  if (fs::exists(fs::path(request.output) / "run.json"))
    throw collective_error(ExitCode::usage, "--output {} is the directory of a run; name another for the sweep",
                           request.output);
  std::vector<Job> jobs = prepare(request, world);
  const auto left = std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return !job.finished; });
  log::info("{} points, {} finished", jobs.size(), static_cast<std::int64_t>(jobs.size()) - left);
  if (request.dry_run) {
    print_points(request, jobs);
    return 0;
  }
  // 2. What is not finished, here or as jobs.
  if (left > 0 && (request.slurm || request.pbs)) {
    submit(request, jobs);
    return 0;
  }
  const int stop = run_jobs(request, jobs);
  // 3. The comparison. A stop is the result; else the first failure.
  conclude(request, jobs);
  int code = stop;
  for (const Job& job : jobs)
    if (job.code > 0 && code == 0) code = job.code;
  return code;
}

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
#include "bench/benchmark_report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/format.hpp"
#include "run/build.hpp"

namespace weft::bench {
namespace {

std::string percent(double value) { return value < 0 ? "-" : fmt::format("{:.0f} %", value); }

std::string million(double value) { return value > 0 ? fmt::format("{:.1f}", value / 1e6) : "-"; }

/// "checkpoint of 226 MiB by 2 ranks (2 cores): written at 0.41 GB/s, 92 % of plain files; …"
std::string text_of(const CheckpointResult& c) {
  const auto rate = [&](double seconds, double percent) {
    return fmt::format("{:.2f} GB/s ({:.0f} % of plain files with fsync)",
                       1e-9 * static_cast<double>(c.bytes) / seconds, percent);
  };
  return fmt::format(
      "checkpoint of {} by {} rank{} on {} cores: written at {}, verified and read at {}; training pauses {:.1f} ms, "
      "one copy of the state takes {:.1f} ms\n"
      "written {} the page cache, {:.2f} s of processor time per GB (plain files: {:.2f})\n"
      "while training: written at {:.2f} GB/s, {:.0f} % of plain files with fsync ({:.2f} GB/s); durable after {:.2f} "
      "s, {:.1f} ms/step instead of {:.1f} until then",
      format::binary_bytes_text(c.bytes), c.writers, c.writers == 1 ? "" : "s", c.cores,
      rate(c.write_seconds, c.write_percent()), rate(c.read_seconds, c.read_percent()), 1e3 * c.pause_seconds,
      1e3 * c.copy_seconds, c.direct ? "past" : "through",
      c.write_processor_seconds * 1e9 / static_cast<double>(c.bytes),
      c.plain_write_processor_seconds * 1e9 / static_cast<double>(c.bytes),
      1e-9 * static_cast<double>(c.bytes) / c.busy_write_seconds, c.busy_write_percent(),
      1e-9 * static_cast<double>(c.bytes) / c.busy_plain_seconds, c.busy_durable_seconds, 1e3 * c.slow_step_seconds,
      1e3 * c.step_seconds);
}

parallel::ExchangeProfile total_of(const CaseResult& c) {
  parallel::ExchangeProfile sum{"all"};
  for (const parallel::ExchangeProfile& one : c.exchanges) {
    sum.bytes += one.bytes;
    sum.seconds += one.seconds;
    sum.calls += one.calls;
  }
  return sum;
}

Json communication_of(const CaseResult& c) {
  const auto entry = [](const parallel::ExchangeProfile& one) {
    return Json{{"name", one.name},
                {"calls_per_step", one.calls},
                {"bytes_per_step", one.bytes},
                {"ms", 1e3 * one.seconds},
                {"gb_per_second", one.gb_per_second()}};
  };
  Json json = entry(total_of(c));
  json.erase("name");
  json["exposed_ms"] = c.exposed_ms;
  json["exposed_least_ms"] = c.exposed_least_ms;
  json["exchanges"] = Json::array();
  for (const parallel::ExchangeProfile& one : c.exchanges) json["exchanges"].push_back(entry(one));
  return json;
}

/// Model FLOP utilisation: operations of the model per second over those that the devices of all ranks state; NaN if
/// they state none.
double utilisation(const BenchmarkResult& result, const CaseResult& c, double flops_per_token) {
  if (!(result.peak_tflops > 0)) return NAN;
  return c.tokens_per_second * flops_per_token / (1e12 * result.peak_tflops * static_cast<double>(result.ranks));
}

std::string utilisation_text(double value) { return std::isnan(value) ? "-" : fmt::format("{:.1f} %", 100 * value); }

Json number_or_null(std::optional<double> value) { return value && std::isfinite(*value) ? Json(*value) : Json(); }

/// Adds the utilisation, for a model with a convention for its operations.
void add_utilisation(const BenchmarkResult& result, const CaseResult& c, Json& one) {
  one["flops_per_token"] = {{"causal", c.flops.causal}, {"full", c.flops.full}};
  one["mfu"] = {{"causal", number_or_null(utilisation(result, c, c.flops.causal))},
                {"full", number_or_null(utilisation(result, c, c.flops.full))}};
}

/// What a comparison with a baseline adds to a case.
void add_judgement(const CaseResult& c, Json& one) {
  one["toggles"] = c.toggles;
  one["left_out"] = c.left_out;
  one["loss_difference"] = number_or_null(c.loss_difference);
  one["times_faster"] = c.compared ? number_or_null(c.times_faster) : Json();
  one["valid"] = c.compared || !c.problem.empty() ? Json(c.problem.empty()) : Json();
  one["problem"] = c.problem;
}

std::string remark(const BenchmarkResult& result, const CaseResult& c) {
  if (result.baseline.empty()) return "";
  const std::string verdict = !c.problem.empty() ? "not valid: " + c.problem
                              : c.compared       ? "valid"
                                                 : "not compared: other tokens per step";
  return c.left_out.empty() ? verdict : fmt::format("{}; without {}", verdict, c.left_out);
}

/// The cases of a model with a convention for its operations.
std::string utilisation_table(const BenchmarkResult& result, std::size_t widest) {
  std::string out = fmt::format(
      "\n\nMFU: with 6N + 6LCT and with 6N + 12LCT operations per token, of {}",
      result.peak_tflops > 0 ? fmt::format("{:g} TFLOP/s{}", result.peak_tflops, result.ranks > 1 ? " per rank" : "")
                             : "a peak that is not stated (benchmark.peak_tflops)");
  out += fmt::format("\nloss: nats per token after {} steps", result.steps);
  if (!result.baseline.empty())
    out += fmt::format("; a row is valid if it differs from that of \"{}\" by at most {:g} of it", result.baseline,
                       result.tolerance);
  out += fmt::format("\n{:<{}} {:>10} {:>8} {:>10} {:>7} {:>8} {:>8} {:>10} {:>9} {:>9}", "case", widest, "ms/step",
                     "+-", "tokens/s", "faster", "6LCT", "12LCT", "memory", "loss", "differs");
  for (const CaseResult& c : result.cases) {
    out += fmt::format("\n{:<{}} {:>10.1f} {:>8.1f} {:>10} {:>7} {:>8} {:>8} {:>10} {:>9} {:>9}", c.name, widest,
                       c.ms_per_step, c.interquartile_ms / 2, format::grouped(std::llround(c.tokens_per_second)),
                       c.compared ? fmt::format("{:.2f}", c.times_faster) : "-",
                       utilisation_text(utilisation(result, c, c.flops.causal)),
                       utilisation_text(utilisation(result, c, c.flops.full)), format::binary_bytes_text(c.peak_bytes),
                       c.loss ? fmt::format("{:.5f}", *c.loss) : "-",
                       c.loss_difference ? fmt::format("{:.1e}", *c.loss_difference) : "-");
    if (const std::string text = remark(result, c); !text.empty()) out += "  " + text;
  }
  return out;
}

/// Bytes that a rank sends per step, the time of the exchanges, and how much of it is exposed.
std::string exchanges_table(const CaseResult& c) {
  const parallel::ExchangeProfile total = total_of(c);
  std::string out = fmt::format("\n{:<18} {:>9} {:>6} {:>11} {:>11}", "exchange", "ms", "calls", "MB sent", "GB/s");
  const auto line = [&](const parallel::ExchangeProfile& one) {
    out += fmt::format("\n{:<18} {:>9.2f} {:>6.1f} {:>11.1f} {:>11.1f}", one.name, 1e3 * one.seconds, one.calls,
                       1e-6 * one.bytes, one.gb_per_second());
  };
  for (const parallel::ExchangeProfile& one : c.exchanges) line(one);
  line(total);
  return out + fmt::format(
                   "\nexposed: {:.2f} ms/step, {:.0f} % of the exchanges' time; {:.2f} ms on the rank that waits least",
                   c.exposed_ms, total.seconds > 0 ? 0.1 * c.exposed_ms / total.seconds : 0.0, c.exposed_least_ms);
}

}  // namespace

Json to_json(const BenchmarkResult& result) {
  Json json;
  const run::BuildRecord& build = run::build_record;
  json["build"] = {{"version", build.version},   {"revision", build.revision},     {"modified", build.modified},
                   {"compiler", build.compiler}, {"build_type", build.build_type}, {"cuda", build.cuda}};
  json["input"] = result.input;
  json["machine"] = {{"device", result.device},
                     {"gpu", result.gpu.empty() ? Json() : Json(result.gpu)},
                     {"copy_gb_per_second", result.machine.copy_gb_per_second},
                     {"gemm_gflops", result.machine.gemm_gflops}};
  json["ranks"] = result.ranks;
  json["grid"] = result.grid;
  json["steps"] = result.steps;
  if (!result.baseline.empty()) {
    json["baseline"] = result.baseline;
    json["loss_tolerance"] = result.tolerance;
  }
  json["machine"]["peak_tflops"] = result.peak_tflops > 0 ? Json(result.peak_tflops) : Json();
  json["cases"] = Json::array();
  for (const CaseResult& c : result.cases) {
    Json one;
    one["name"] = c.name;
    one["overrides"] = c.overrides;
    one["grid"] = c.grid.empty() ? result.grid : c.grid;
    one["ms_per_step"] = c.ms_per_step;
    one["fastest_ms"] = c.fastest_ms;
    one["interquartile_ms"] = c.interquartile_ms;
    one["tokens_per_second"] = c.tokens_per_second;
    one["tokens_per_step"] = c.tokens_per_step;
    one["peak_bytes"] = c.peak_bytes;
    one["state_bytes"] = c.state_bytes;
    if (c.driver_bytes > 0) one["driver_bytes"] = c.driver_bytes;
    one["phases"] = Json::array();
    for (const Phase& phase : c.phases) {
      Json entry = {{"name", phase.name}, {"ms", phase.ms}, {"bytes", phase.bytes}, {"flops", phase.flops}};
      entry["percent_of_limit"] = phase.percent_of_limit < 0 ? Json() : Json(phase.percent_of_limit);
      one["phases"].push_back(entry);
    }
    one["row_bytes"] = c.row_bytes;
    one["loss"] = number_or_null(c.loss);
    if (c.flops.causal > 0) add_utilisation(result, c, one);
    if (!result.baseline.empty()) add_judgement(c, one);
    if (result.ranks > 1) one["communication"] = communication_of(c);
    json["cases"].push_back(one);
  }
  json["not_measured"] = Json::array();
  for (const NotMeasured& c : result.not_measured)
    json["not_measured"].push_back({{"name", c.name}, {"reason", c.reason}});
  if (result.checkpoint) {
    const CheckpointResult& c = *result.checkpoint;
    const auto direction = [&](double seconds, double plain, double percent) {
      return Json{{"seconds", seconds}, {"plain_seconds", plain}, {"percent_of_plain", percent}};
    };
    json["checkpoint"] = {{"bytes", c.bytes},
                          {"writers", c.writers},
                          {"cores", c.cores},
                          {"direct", c.direct},
                          {"write_processor_seconds", c.write_processor_seconds},
                          {"plain_write_processor_seconds", c.plain_write_processor_seconds},
                          {"write", direction(c.write_seconds, c.plain_write_seconds, c.write_percent())},
                          {"write_while_training",
                           {{"seconds", c.busy_write_seconds},
                            {"plain_seconds", c.busy_plain_seconds},
                            {"percent_of_plain", c.busy_write_percent()},
                            {"durable_seconds", c.busy_durable_seconds},
                            {"ms_per_step", 1e3 * c.step_seconds},
                            {"ms_per_step_during", 1e3 * c.slow_step_seconds}}},
                          {"read", direction(c.read_seconds, c.plain_read_seconds, c.read_percent())},
                          {"pause_seconds", c.pause_seconds},
                          {"copy_seconds", c.copy_seconds}};
  }
  if (!result.profile.is_null()) json["profile"] = result.profile;
  return json;
}

std::string to_table(const BenchmarkResult& result) {
  std::string out = fmt::format("limits of the machine: memory copy {:.1f} GB/s, dense product {:.0f} GFLOP/s",
                                result.machine.copy_gb_per_second, result.machine.gemm_gflops);
  for (const CaseResult& c : result.cases) {
    out += fmt::format("\n\n{}{}{}: {:.1f} ms/step, {} tokens/s; state {}, other memory {}\n", c.name,
                       c.overrides.empty() ? "" : " with ", c.overrides, c.ms_per_step,
                       format::grouped(std::llround(c.tokens_per_second)), format::binary_bytes_text(c.state_bytes),
                       format::binary_bytes_text(c.peak_bytes - c.state_bytes));
    if (c.driver_bytes > 0)
      out +=
          fmt::format("the driver reports {} in use, libraries included\n", format::binary_bytes_text(c.driver_bytes));
    if (!c.grid.empty() && c.grid != result.grid) {
      std::vector<std::string> axes;
      for (const auto& [axis, ranks] : c.grid) axes.push_back(fmt::format("{} = {}", axis, ranks));
      out += fmt::format("grid: {}\n", fmt::join(axes, ", "));
    }
    out += fmt::format("{:<18} {:>9} {:>6} {:>11} {:>11} {:>9}", "phase", "ms", "%", "MB", "MFLOP", "of limit");
    for (const Phase& phase : c.phases)
      out += fmt::format("\n{:<18} {:>9.2f} {:>6.1f} {:>11} {:>11} {:>9}", phase.name, phase.ms,
                         100 * phase.ms / c.ms_per_step, million(phase.bytes), million(phase.flops),
                         percent(phase.percent_of_limit));
    if (result.ranks > 1) out += exchanges_table(c);
  }
  if (result.checkpoint) out += "\n\n" + text_of(*result.checkpoint);
  const auto with_not_measured = [&](std::string text) {
    for (const NotMeasured& c : result.not_measured) text += fmt::format("\n{}: not measured, {}", c.name, c.reason);
    return text;
  };
  std::size_t widest = 18;
  for (const CaseResult& c : result.cases) widest = std::max(widest, c.name.size());
  if (!result.cases.empty() && result.cases.front().flops.causal > 0)
    return with_not_measured(out + utilisation_table(result, widest));
  if (result.cases.size() < 2) return with_not_measured(out);
  const CaseResult& first = result.cases.front();
  out += fmt::format("\n\n{:<{}} {:>10} {:>12} {:>14} {:>16}", "case", widest, "ms/step", "tokens/s",
                     "time / " + first.name, "other memory");
  if (result.ranks > 1) out += fmt::format(" {:>12} {:>10} {:>10}", "exchanges ms", "exposed ms", "MB sent");
  for (const CaseResult& c : result.cases) {
    out += fmt::format("\n{:<{}} {:>10.1f} {:>12} {:>14.2f} {:>16}", c.name, widest, c.ms_per_step,
                       format::grouped(std::llround(c.tokens_per_second)), c.ms_per_step / first.ms_per_step,
                       format::binary_bytes_text(c.peak_bytes - c.state_bytes));
    if (result.ranks == 1) continue;
    const parallel::ExchangeProfile total = total_of(c);
    out += fmt::format(" {:>12.2f} {:>10} {:>10.1f}", 1e3 * total.seconds,
                       c.exposed_ms < 0 ? "-" : fmt::format("{:.2f}", c.exposed_ms), 1e-6 * total.bytes);
  }
  return with_not_measured(out);
}

std::string to_csv(const BenchmarkResult& result) {
  const auto quoted = [](const std::string& text) {
    std::string out = "\"";
    for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
    return out + "\"";
  };
  const auto number = [](std::optional<double> value) {
    return value && std::isfinite(*value) ? fmt::format("{:.9g}", *value) : "";
  };
  std::string out =
      "name,overrides,toggles,ms_per_step,interquartile_ms,tokens_per_second,mfu_causal,mfu_full,peak_bytes,state_"
      "bytes,"
      "loss,loss_difference,times_faster,valid,remark\n";
  for (const CaseResult& c : result.cases)
    out += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", quoted(c.name), quoted(c.overrides),
                       quoted(fmt::format("{}", fmt::join(c.toggles, ", "))), number(c.ms_per_step),
                       number(c.interquartile_ms), number(c.tokens_per_second),
                       number(utilisation(result, c, c.flops.causal)), number(utilisation(result, c, c.flops.full)),
                       c.peak_bytes, c.state_bytes, number(c.loss), number(c.loss_difference),
                       c.compared ? number(c.times_faster) : "", c.compared ? fmt::to_string(c.problem.empty()) : "",
                       quoted(remark(result, c)));
  for (const NotMeasured& c : result.not_measured)
    out += fmt::format("{},,,,,,,,,,,,,,{}\n", quoted(c.name), quoted("not measured: " + c.reason));
  return out;
}

namespace {

/// The cases of a benchmark.json, or of this type of GPU and this input in a reference of speeds.
Json cases_of(const BenchmarkResult& result, const Json& reference) {
  const auto member = [](const Json& json, const std::string& name) {
    return json.is_object() && json.contains(name) ? json[name] : Json();
  };
  const Json gpus = member(reference, "gpus");
  if (!gpus.is_object()) return member(reference, "cases");
  if (!gpus.contains(result.gpu)) {
    std::vector<std::string> known;
    for (const auto& [name, entry] : gpus.items()) known.push_back(name);
    throw error(ExitCode::usage,
                "--compare: there are no speeds of {} ({} known: {}); give the benchmark.json of an earlier run",
                result.gpu.empty() ? "this machine, which has no GPU" : result.gpu, known.size(),
                fmt::join(known, ", "));
  }
  return member(gpus[result.gpu], result.input);
}

}  // namespace

Comparison compare(const BenchmarkResult& result, const Json& reference, double ratio) {
  Comparison comparison;
  const Json others = cases_of(result, reference);
  for (const CaseResult& c : result.cases) {
    double before = 0;
    std::string source;
    if (others.is_array())
      for (const Json& other : others)
        if (other.is_object() && other.value("name", Json()) == Json(c.name) &&
            other.value("ranks", Json(result.ranks)) == Json(result.ranks) && other.contains("ms_per_step") &&
            other["ms_per_step"].is_number()) {
          before = other["ms_per_step"].get<double>();
          if (other.contains("source") && other["source"].is_string())
            source = "; " + other["source"].get<std::string>();
        }
    if (!(before > 0)) continue;
    const double times = c.ms_per_step / before;
    const bool slower = times > ratio;
    comparison.slower = comparison.slower || slower;
    comparison.text += fmt::format("\n{}: {:.1f} ms/step, before {:.1f} ms ({:.2f} times{}{})", c.name, c.ms_per_step,
                                   before, times, slower ? fmt::format(", more than {:.2f}", ratio) : "", source);
  }
  if (comparison.text.empty())
    throw error(ExitCode::usage,
                "--compare: there is nothing to compare (the file has none of these cases, or is neither a "
                "benchmark.json nor a reference of speeds)");
  comparison.text.erase(0, 1);
  return comparison;
}

}  // namespace weft::bench

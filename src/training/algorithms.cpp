// SPDX-License-Identifier: Apache-2.0
#include "training/algorithms.hpp"

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "device/memory.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/runtime.hpp"
#include "report/run_record.hpp"
#include "storage/durable.hpp"

namespace weft::training {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;

using kernels::Form;
using kernels::Scalar;
using kernels::cuda::GemmRecord;
using kernels::cuda::GemmShape;

report::Json to_json(const GemmRecord& record) {
  const GemmShape& shape = record.shape;
  const auto name = [](Scalar type) {
    return type == Scalar::bf16 ? "bf16" : type == Scalar::fp16 ? "fp16" : type == Scalar::u8 ? "e4m3" : "fp32";
  };
  report::Json json = {{"n_tokens", shape.rows},          {"n_features", shape.columns},
                       {"d_model", shape.inner},          {"input_stride", shape.a_stride},
                       {"weight_stride", shape.b_stride}, {"product_stride", shape.c_stride},
                       {"input", name(shape.input)},      {"product", name(shape.output)},
                       {"alignment", shape.alignment},    {"gpu", record.gpu},
                       {"library", record.library},       {"algorithm", record.algorithm},
                       {"workspace", record.workspace},   {"milliseconds", record.milliseconds}};
  // The names are those of the encoder's product; other forms are marked.
  if (shape.a_form == Form::transposed) json["input_transposed"] = true;
  if (shape.b_form == Form::plain) json["weight_transposed"] = false;
  if (shape.tf32) json["tf32"] = true;
  return json;
}

GemmRecord from_json(const report::Json& json) {
  const auto type = [&](const char* key) {
    const report::Json& name = json.at(key);
    return name == "bf16" ? Scalar::bf16 : name == "fp16" ? Scalar::fp16 : name == "e4m3" ? Scalar::u8 : Scalar::fp32;
  };
  GemmRecord record;
  const auto form = [&](const char* key, bool otherwise) {
    return json.value(key, otherwise) ? Form::transposed : Form::plain;
  };
  record.shape = {.rows = json.at("n_tokens"),
                  .columns = json.at("n_features"),
                  .inner = json.at("d_model"),
                  .a_stride = json.at("input_stride"),
                  .b_stride = json.at("weight_stride"),
                  .c_stride = json.at("product_stride"),
                  .input = type("input"),
                  .output = type("product"),
                  .alignment = json.at("alignment"),
                  .a_form = form("input_transposed", false),
                  .b_form = form("weight_transposed", true),
                  .tf32 = json.value("tf32", false)};
  record.gpu = json.at("gpu");
  record.library = json.at("library");
  record.algorithm = json.at("algorithm");
  record.workspace = json.at("workspace");
  record.milliseconds = json.at("milliseconds");
  return record;
}

/// Random bf16 numbers: on zeros a GPU draws less power and runs faster than on data.
device::Buffer<std::byte> random_rows(const kernels::Execution& execution, std::int64_t rows, std::int64_t stride) {
  device::Buffer<std::byte> memory(2 * rows * stride);
  const kernels::ParameterRows matrix{.policy = kernels::StatePolicy::bf16,
                                      .rows = rows,
                                      .columns = stride,
                                      .segment = stride,
                                      .weight = memory.data()};
  kernels::initialise_uniform(execution, matrix, 1.0f, 1, kernels::Purpose::benchmark);
  return memory;
}

GemmRecord tuned(const kernels::Execution& execution, const GemmRecord& record) {
  if constexpr (!kernels::kCudaBuild) {
    static_cast<void>(execution);
    return record;
  } else {
    const GemmShape& shape = record.shape;
    if (shape.input == Scalar::u8) return record;  // products in codes keep the library's first proposal
    const std::int64_t words = kernels::bytes_of(shape.input) / 2;
    const device::Buffer<std::byte> a =
        random_rows(execution, shape.a_form == Form::plain ? shape.rows : shape.inner, words * shape.a_stride);
    const device::Buffer<std::byte> b =
        random_rows(execution, shape.b_form == Form::plain ? shape.inner : shape.columns, words * shape.b_stride);
    const device::Buffer<std::byte> c(shape.rows * shape.c_stride * kernels::bytes_of(shape.output)),
        workspace(kernels::cuda::kGemmWorkspace);
    const GemmRecord best =
        kernels::cuda::Gemm::tune(execution, shape, a.data(), b.data(), c.data(), workspace.array());
    const double teraflops = 2e-9 * static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
                             static_cast<double>(shape.inner) / std::max(best.milliseconds, 1e-9);
    log::info("{} x {} x {}: {:.4f} ms, {:.0f} TFLOP/s{}", shape.rows, shape.inner, shape.columns, best.milliseconds,
              teraflops, best.algorithm == record.algorithm ? " (the first that the library proposes)" : "");
    return best;
  }
}

/// The list under "algorithms". Throws a collective Error(usage) naming `source`.
void add_records(const report::Json& json, const std::string& source, std::vector<GemmRecord>& records) {
  try {
    for (const report::Json& each : json.at("algorithms")) records.push_back(from_json(each));
  } catch (const report::Json::exception& failed) {
    throw collective_error(ExitCode::usage, "{} is not a record of algorithms ({}); weft benchmark --tune writes one",
                           source, failed.what());
  }
}

}  // namespace

void use_recorded_algorithms(const std::string& path, const parallel::World& world, const std::string& manifest_extra) {
  std::vector<GemmRecord> records;
  // Those of the manifest first: the first record that fits a shape is used.
  if (!manifest_extra.empty()) {
    const report::Json extra = parse_json(manifest_extra);
    if (extra.is_object() && extra.contains("algorithms")) add_records(extra, "the checkpoint's manifest", records);
  }
  if (!path.empty()) {
    std::string text;
    world.on_root([&]() -> std::string {
      try {
        text = storage::read_text(open_regular(path), path, kLargestFile);
      } catch (const Error& failure) {
        throw error(ExitCode::usage, "device.algorithms cannot be read ({}); weft benchmark --tune writes it",
                    failure.what());
      }
      return "";
    });
    text = world.all().broadcast(std::move(text), 0);
    add_records(parse_json(text), path, records);
  }
  if constexpr (kernels::kCudaBuild) kernels::cuda::use_gemm_records(std::move(records));
}

report::Json algorithms_in_use() {
  report::Json all = report::Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use()) all.push_back(to_json(record));
  return all;
}

void tune_algorithms(const kernels::Execution& execution, const std::filesystem::path& file) {
  report::Json all = report::Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use())
      all.push_back(to_json(tuned(execution, record)));
  report::write_json(file, {{"algorithms", all}});
  log::info("written to {}; name it as device.algorithms in an input", file.string());
}

}  // namespace weft::training

// SPDX-License-Identifier: Apache-2.0
#include "training/algorithms.hpp"

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "device/memory.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/runtime.hpp"
#include "report/run_record.hpp"
#include "storage/durable.hpp"

namespace weft::training {
namespace {

constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;

using kernels::AttentionImplementation;
using kernels::AttentionPass;
using kernels::AttentionRecord;
using kernels::AttentionSizes;
using kernels::Epilogue;
using kernels::Scalar;
using kernels::cuda::GemmRecord;
using kernels::cuda::GemmShape;

constexpr std::pair<Epilogue::Kind, const char*> kEpilogues[] = {{Epilogue::Kind::none, "none"},
                                                                 {Epilogue::Kind::bias, "bias"},
                                                                 {Epilogue::Kind::bias_gelu, "bias_gelu"},
                                                                 {Epilogue::Kind::gelu_gradient, "gelu_gradient"}};

Epilogue::Kind epilogue_named(const std::string& name) {
  for (const auto& [kind, each] : kEpilogues)
    if (name == each) return kind;
  throw error(ExitCode::usage, "\"{}\" is no epilogue of a product", name);
}

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
  if (shape.a_form == kernels::Form::transposed) json["input_transposed"] = true;
  if (shape.b_form == kernels::Form::plain) json["weight_transposed"] = false;
  if (shape.epilogue != Epilogue::Kind::none) {
    json["epilogue"] = kEpilogues[static_cast<std::size_t>(shape.epilogue)].second;
    json["hidden_stride"] = shape.hidden_stride;
  }
  if (shape.tf32) json["tf32"] = true;
  if (shape.batch.count > 1) json["batch"] = {shape.batch.count, shape.batch.a, shape.batch.b, shape.batch.c};
  return json;
}

GemmRecord from_json(const report::Json& json) {
  const auto type = [&](const char* key) {
    const report::Json& name = json.at(key);
    return name == "bf16" ? Scalar::bf16 : name == "fp16" ? Scalar::fp16 : name == "e4m3" ? Scalar::u8 : Scalar::fp32;
  };
  GemmRecord record;
  const auto form = [&](const char* key, bool otherwise) {
    return json.value(key, otherwise) ? kernels::Form::transposed : kernels::Form::plain;
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
                  .epilogue = epilogue_named(json.value("epilogue", "none")),
                  .hidden_stride = json.value("hidden_stride", std::int64_t{0}),
                  .tf32 = json.value("tf32", false)};
  if (const auto batch = json.find("batch"); batch != json.end())
    record.shape.batch = {batch->at(0), batch->at(1), batch->at(2), batch->at(3)};
  record.gpu = json.at("gpu");
  record.library = json.at("library");
  record.algorithm = json.at("algorithm");
  record.workspace = json.at("workspace");
  record.milliseconds = json.at("milliseconds");
  return record;
}

/// In the same list as products; marked by "operation".
report::Json to_json(const AttentionRecord& record) {
  const AttentionSizes& sizes = record.sizes;
  return {{"operation", "attention"},
          {"pass", sizes.pass == AttentionPass::forward ? "forward" : "backward"},
          {"sequences", sizes.sequences},
          {"length", sizes.length},
          {"heads", sizes.heads},
          {"kv_heads", sizes.kv_heads},
          {"head_size", sizes.head_size},
          {"window", sizes.window},
          {"input", sizes.type == Scalar::bf16 ? "bf16" : "fp16"},
          {"gpu", record.gpu},
          {"library", record.library},
          {"implementation", record.implementation == AttentionImplementation::cudnn ? "cudnn" : "own"},
          {"own_milliseconds", record.own_milliseconds},
          {"cudnn_milliseconds", record.cudnn_milliseconds}};
}

AttentionRecord attention_from_json(const report::Json& json) {
  return {.sizes = {.pass = json.at("pass") == "forward" ? AttentionPass::forward : AttentionPass::backward,
                    .sequences = json.at("sequences"),
                    .length = json.at("length"),
                    .heads = json.at("heads"),
                    .kv_heads = json.at("kv_heads"),
                    .head_size = json.at("head_size"),
                    .window = json.at("window"),
                    .type = json.at("input") == "bf16" ? Scalar::bf16 : Scalar::fp16},
          .gpu = json.at("gpu"),
          .library = json.at("library"),
          .implementation =
              json.at("implementation") == "cudnn" ? AttentionImplementation::cudnn : AttentionImplementation::own,
          .own_milliseconds = json.at("own_milliseconds"),
          .cudnn_milliseconds = json.at("cudnn_milliseconds")};
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
    // Rows of all matrices of a batch.
    const auto of_batch = [&](std::int64_t rows, std::int64_t stride, std::int64_t distance) {
      return rows + ((shape.batch.count - 1) * distance + stride - 1) / stride;
    };
    const device::Buffer<std::byte> a = random_rows(
        execution,
        of_batch(shape.a_form == kernels::Form::plain ? shape.rows : shape.inner, shape.a_stride, shape.batch.a),
        words * shape.a_stride);
    const device::Buffer<std::byte> b = random_rows(
        execution,
        of_batch(shape.b_form == kernels::Form::plain ? shape.inner : shape.columns, shape.b_stride, shape.batch.b),
        words * shape.b_stride);
    const device::Buffer<std::byte> c(of_batch(shape.rows, shape.c_stride, shape.batch.c) * shape.c_stride *
                                      kernels::bytes_of(shape.output)),
        workspace(kernels::cuda::kGemmWorkspace);
    // What an epilogue reads.
    const device::Buffer<std::byte> bias = random_rows(execution, 1, shape.columns),
                                    hidden = random_rows(execution, shape.rows, shape.hidden_stride);
    const Epilogue epilogue{
        shape.epilogue, bias.data(), {hidden.data(), Scalar::bf16, shape.rows, shape.columns, shape.hidden_stride}};
    const GemmRecord best =
        kernels::cuda::Gemm::tune(execution, shape, a.data(), b.data(), c.data(), workspace.array(), epilogue);
    const double teraflops = 2e-9 * static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
                             static_cast<double>(shape.inner) / std::max(best.milliseconds, 1e-9);
    log::info("{} x {} x {}: {:.4f} ms, {:.0f} TFLOP/s{}", shape.rows, shape.inner, shape.columns, best.milliseconds,
              teraflops, best.algorithm == record.algorithm ? " (the first that the library proposes)" : "");
    return best;
  }
}

AttentionRecord tuned(const kernels::Execution& execution, const AttentionRecord& record) {
  if constexpr (!kernels::kCudnnBuild) {
    static_cast<void>(execution);
    return record;
  } else {
    const AttentionSizes& sizes = record.sizes;
    const std::int64_t rows = sizes.sequences * sizes.length, columns = sizes.heads * sizes.head_size,
                       packed = columns + 2 * sizes.kv_heads * sizes.head_size;
    // Numbers of two bytes; those of fp16 are random bits of bf16, which are finite.
    const device::Buffer<std::byte> inputs = random_rows(execution, rows, packed),
                                    out_gradient = random_rows(execution, rows, columns), gradients(2 * rows * packed),
                                    out(2 * rows * columns), workspace(kernels::tuning_workspace(execution, sizes));
    const device::Buffer<float> log_sum(rows * sizes.heads);
    const auto matrix = [&](const device::Buffer<std::byte>& memory, std::int64_t width) {
      return kernels::AnyMatrix{memory.data(), sizes.type, rows, width, width};
    };
    const AttentionRecord best =
        kernels::tune_attention(execution, record,
                                {matrix(inputs, packed), matrix(gradients, packed), matrix(out, columns),
                                 matrix(out_gradient, columns), log_sum.array(), workspace.array()});
    log::info("attention {}, {} x {} rows, {} heads of {}: own {:.4f} ms, cuDNN {}",
              sizes.pass == AttentionPass::forward ? "forward" : "backward", sizes.sequences, sizes.length, sizes.heads,
              sizes.head_size, best.own_milliseconds,
              best.cudnn_milliseconds > 0 ? fmt::format("{:.4f} ms", best.cudnn_milliseconds)
              : best.library > 0          ? "does not take it"
                                          : "is absent (" + kernels::cudnn::absence() + ")");
    return best;
  }
}

struct Records {
  std::vector<GemmRecord> products;
  std::vector<AttentionRecord> attention;
};

/// The list under "algorithms". Throws a collective Error(usage) naming `source`.
void add_records(const report::Json& json, const std::string& source, Records& records) {
  try {
    for (const report::Json& each : json.at("algorithms"))
      if (each.value("operation", "product") == "attention")
        records.attention.push_back(attention_from_json(each));
      else
        records.products.push_back(from_json(each));
  } catch (const report::Json::exception& failed) {
    throw collective_error(ExitCode::usage, "{} is not a record of algorithms ({}); weft benchmark --tune writes one",
                           source, failed.what());
  }
}

}  // namespace

void use_recorded_algorithms(const std::string& path, const parallel::World& world, const std::string& manifest_extra) {
  Records records;
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
  if constexpr (kernels::kCudaBuild) kernels::cuda::use_gemm_records(std::move(records.products));
  if constexpr (kernels::kCudnnBuild)
    for (const AttentionRecord& record : records.attention)
      if (record.implementation == AttentionImplementation::cudnn && record.library != kernels::cudnn::version()) {
        const std::string found = kernels::cudnn::version() == 0
                                      ? "which cannot be used: " + kernels::cudnn::absence()
                                      : "here it is " + kernels::cudnn::text_of_version(kernels::cudnn::version());
        log::warning(
            "attention is recorded for cuDNN {} ({}): it runs on the own kernels; name the folder of libcudnn.so.9 in "
            "WEFT_CUDNN, or tune again (weft benchmark --tune)",
            kernels::cudnn::text_of_version(record.library), found);
        break;
      }
  kernels::use_attention_records(std::move(records.attention));
}

report::Json algorithms_in_use() {
  report::Json all = report::Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use()) all.push_back(to_json(record));
  for (const AttentionRecord& record : kernels::attention_records_in_use()) all.push_back(to_json(record));
  return all;
}

void tune_algorithms(const kernels::Execution& execution, const std::filesystem::path& file) {
  report::Json all = report::Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use())
      all.push_back(to_json(tuned(execution, record)));
  for (const AttentionRecord& record : kernels::attention_records_in_use())
    all.push_back(to_json(tuned(execution, record)));
  report::write_json(file, {{"algorithms", all}});
  log::info("written to {}; name it as device.algorithms in an input", file.string());
}

}  // namespace weft::training

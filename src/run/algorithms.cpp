// SPDX-License-Identifier: Apache-2.0
#include "run/algorithms.hpp"

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "storage/durable.hpp"

namespace weft::run {
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

GemmRecord from_json(const Json& json) {
  const auto type = [&](const char* key) {
    const Json& name = json.at(key);
    return name == "bf16" ? Scalar::bf16 : name == "fp16" ? Scalar::fp16 : name == "codes" ? Scalar::u8 : Scalar::fp32;
  };
  GemmRecord record;
  const auto form = [&](const char* key, bool otherwise) {
    return json.value(key, otherwise) ? kernels::Form::transposed : kernels::Form::plain;
  };
  const auto code = [&](const char* key) {
    return json.value(key, "e4m3") == "e5m2" ? kernels::CodeType::e5m2 : kernels::CodeType::e4m3;
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
                  .tf32 = json.value("tf32", false),
                  .a_code = code("input_code"),
                  .b_code = code("weight_code"),
                  .fast = json.value("fast", false)};
  if (const auto batch = json.find("batch"); batch != json.end())
    record.shape.batch = {batch->at(0), batch->at(1), batch->at(2), batch->at(3)};
  record.gpu = json.at("gpu");
  record.library = json.at("library");
  record.algorithm = json.at("algorithm");
  record.workspace = json.at("workspace");
  record.milliseconds = json.at("milliseconds");
  return record;
}

AttentionRecord attention_from_json(const Json& json) {
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

struct Records {
  std::vector<GemmRecord> products;
  std::vector<AttentionRecord> attention;
};

/// The list under "algorithms". Throws a collective Error(usage) naming `source`.
void add_records(const Json& json, const std::string& source, Records& records) {
  try {
    for (const Json& each : json.at("algorithms"))
      if (each.value("operation", "product") == "attention")
        records.attention.push_back(attention_from_json(each));
      else
        records.products.push_back(from_json(each));
  } catch (const Json::exception& failed) {
    throw collective_error(ExitCode::usage, "{} is not a record of algorithms ({}); weft benchmark --tune writes one",
                           source, failed.what());
  }
}

}  // namespace

Json to_json(const GemmRecord& record) {
  const GemmShape& shape = record.shape;
  const auto name = [](Scalar type) {
    return type == Scalar::bf16 ? "bf16" : type == Scalar::fp16 ? "fp16" : type == Scalar::u8 ? "codes" : "fp32";
  };
  Json json = {{"n_tokens", shape.rows},          {"n_features", shape.columns},
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
  if (shape.a_code == kernels::CodeType::e5m2) json["input_code"] = "e5m2";
  if (shape.b_code == kernels::CodeType::e5m2) json["weight_code"] = "e5m2";
  if (shape.fast) json["fast"] = true;
  if (shape.batch.count > 1) json["batch"] = {shape.batch.count, shape.batch.a, shape.batch.b, shape.batch.c};
  return json;
}

Json to_json(const AttentionRecord& record) {
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

void use_recorded_algorithms(const std::string& path, const parallel::World& world, const std::string& manifest_extra) {
  Records records;
  // The algorithms of the manifest come first: the first entry of the table that fits a shape is used.
  if (!manifest_extra.empty()) {
    const Json extra = parse_json(manifest_extra);
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

Json algorithms_in_use() {
  Json all = Json::array();
  if constexpr (kernels::kCudaBuild)
    for (const GemmRecord& record : kernels::cuda::gemm_records_in_use()) all.push_back(to_json(record));
  for (const AttentionRecord& record : kernels::attention_records_in_use()) all.push_back(to_json(record));
  return all;
}

}  // namespace weft::run

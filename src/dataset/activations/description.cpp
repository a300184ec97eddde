// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/description.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using json = SortedJson;

}  // namespace

std::string_view name_of(Scalar type) {
  switch (type) {
    case Scalar::fp32:
      return "fp32";
    case Scalar::fp16:
      return "fp16";
    case Scalar::bf16:
      return "bf16";
    default:
      return "unknown";
  }
}

std::string to_text(const Description& d) {
  json files = json::array();
  for (const FileDescription& file : d.files)
    files.push_back({file.name, file.bytes, file.rows, file.chunk_rows, file.compressed, file.modified, file.probe});
  return json_text(json{{"path", d.path},
                        {"own_layout", d.own_layout},
                        {"layout", d.layout},
                        {"model", d.model},
                        {"hook_inputs", d.hook_inputs},
                        {"hook_targets", d.hook_targets},
                        {"n_layers", d.n_layers},
                        {"d_model", d.d_model},
                        {"n_rows", d.n_rows},
                        {"dtype", static_cast<int>(d.dtype)},
                        {"files", files},
                        {"has_statistics", d.has_statistics},
                        {"has_tokens", d.has_tokens},
                        {"n_documents", d.n_documents},
                        {"has_vocabulary", d.has_vocabulary},
                        {"fingerprint", d.fingerprint},
                        {"notes", d.notes}});
}

Description description_from_text(const std::string& text) {
  try {
    const json j = parse_json<json>(text);
    Description d;
    d.path = j.at("path");
    d.own_layout = j.at("own_layout");
    d.layout = j.at("layout");
    d.model = j.at("model");
    d.hook_inputs = j.at("hook_inputs");
    d.hook_targets = j.at("hook_targets");
    d.n_layers = j.at("n_layers");
    d.d_model = j.at("d_model");
    d.n_rows = j.at("n_rows");
    d.dtype = static_cast<Scalar>(j.at("dtype").get<int>());
    for (const json& file : j.at("files"))
      d.files.push_back({file.at(0), file.at(1), file.at(2), file.at(3), file.at(4), file.at(5), file.at(6)});
    d.has_statistics = j.at("has_statistics");
    d.has_tokens = j.at("has_tokens");
    d.n_documents = j.at("n_documents");
    d.has_vocabulary = j.at("has_vocabulary");
    d.fingerprint = j.at("fingerprint");
    d.notes = j.at("notes").get<std::vector<std::string>>();
    return d;
  } catch (const json::exception& failure) {
    throw error(ExitCode::internal, "the text form of a dataset description cannot be parsed ({})", failure.what());
  }
}

std::string summary(const Description& d) {
  std::int64_t bytes = 0, compressed = 0, shortest = d.files.front().rows, longest = 0;
  for (const FileDescription& file : d.files) {
    bytes += file.bytes;
    compressed += file.compressed;
    shortest = std::min(shortest, file.rows);
    longest = std::max(longest, file.rows);
  }
  std::string text = fmt::format("{}: activations in {} layout\n", d.path,
                                 d.own_layout       ? "Weft's own"
                                 : d.layout.empty() ? "crosslayer-coding's"
                                                    : d.layout + "'s");
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<13} {}\n", name, value);
  };
  if (!d.model.empty()) line("model", printable(d.model));
  if (!d.hook_inputs.empty()) line("inputs", printable(d.hook_inputs));
  if (!d.hook_targets.empty()) line("targets", printable(d.hook_targets));
  line("shape", fmt::format("{} layers, d_model {}, {} rows, {}", d.n_layers, d.d_model, d.n_rows, name_of(d.dtype)));
  line("files", fmt::format("{}, {} to {} rows each, {:.1f} MB together, {} compressed", d.files.size(), shortest,
                            longest, static_cast<double>(bytes) * 1e-6, compressed));
  line("statistics", d.has_statistics ? "norm_stats.json" : "not stored");
  if (d.has_tokens)
    line("tokens",
         fmt::format("ids of all rows, {}, {}",
                     d.n_documents > 0 ? fmt::format("{} documents", d.n_documents) : "no document boundaries",
                     d.has_vocabulary ? "vocabulary.json" : "no texts"));
  else
    line("tokens", "not stored");
  line("fingerprint", d.fingerprint);
  for (const std::string& note : d.notes) line("note", note);
  return text;
}

}  // namespace weft::dataset

// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/model_directory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "interchange/checkpoint.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/step/adapters.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "language_model/tokenizer/tokenizer_files.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;
using model::ParameterSpec;

constexpr const char *kConfig = "config.json", *kWeights = "model.safetensors",
                     *kIndex = "model.safetensors.index.json";
/// Limits of file sizes in bytes: config.json has kilobytes, an index 100 bytes per tensor.
constexpr std::int64_t kLargestConfig = std::int64_t{16} << 20;
constexpr std::size_t kMostFiles = 1 << 14;
/// Number of elements that are copied at a time.
constexpr std::int64_t kPiece = std::int64_t{4} << 20;

std::string read_file(const fs::path& path) {
  const Descriptor file = open_regular(path, ExitCode::data);
  return storage::read_text(file, path, kLargestConfig);
}

/// True for a tensor of older files that follows from the architecture.
bool is_redundant(std::string_view name, const HuggingfaceConfig& config, std::string_view prefix) {
  std::string_view blocks = config.family->blocks;
  if (!prefix.empty()) blocks.remove_prefix(prefix.size());
  if (!name.starts_with(blocks)) return false;
  name.remove_prefix(blocks.size());
  const std::string_view layer = name.substr(0, name.find('.'));
  std::int64_t number = -1;
  std::from_chars(layer.data(), layer.data() + layer.size(), number);
  if (number < 0 || number >= config.model.layers) return false;
  name.remove_prefix(layer.size());
  const std::span<const std::string_view> redundant = config.family->redundant;
  return std::find(redundant.begin(), redundant.end(), name) != redundant.end();
}

/// Number of parts in a file name, 3 for "model-00001-of-00003.safetensors"; 0 for another name.
std::size_t parts_in(std::string_view name) {
  constexpr std::string_view kOf = "-of-", kEnd = ".safetensors";
  const std::size_t at = name.rfind(kOf);
  if (at == name.npos || !name.ends_with(kEnd)) return 0;
  std::size_t parts = 0;
  const char* const end = name.data() + name.size() - kEnd.size();
  return std::from_chars(name.data() + at + kOf.size(), end, parts).ptr == end ? parts : 0;
}

/// Calls piece(first, count) for the rows of a matrix.
template <class Piece>
void by_pieces(std::int64_t rows, std::int64_t columns, const Piece& piece) {
  const std::int64_t most = std::max<std::int64_t>(1, kPiece / columns);
  for (std::int64_t row = 0; row < rows; row += most) {
    note_progress();
    piece(row, std::min(most, rows - row));
  }
}

/// Copies between the host and the rows whose weights this rank keeps.
class Copy {
 public:
  Copy(const model::Parameters& parameters, std::size_t parameter, const kernels::Execution& execution)
      : parameters_(parameters),
        parameter_(parameter),
        spec_(parameters.specs()[parameter]),
        stored_(parameters.stored(parameter)),
        execution_(execution) {
    if (spec_.is_matrix())
      staged_ = device::Buffer<float>(std::min(stored_.size(), std::max<std::int64_t>(1, kPiece / spec_.columns())) *
                                      spec_.columns());
  }

  /// from: the held rows.
  void to_device(const float* from) const {
    from += (stored_.begin - parameters_.parts(parameter_).held.begin) * spec_.columns();
    if (!spec_.is_matrix())
      return copy(parameters_.vector(parameter_).weight.data, from, stored_.size(), device::Direction::to_device);
    by_pieces(stored_.size(), spec_.columns(), [&](std::int64_t row, std::int64_t count) {
      copy(staged_.data(), from + row * spec_.columns(), count * spec_.columns(), device::Direction::to_device);
      kernels::weights_from_float(execution_, parameters_.stored_matrix(parameter_), row,
                                  staged_.matrix(count, spec_.columns()));
      kernels::fence(execution_);
    });
  }
  /// Copies all rows to the host. For one process only.
  void to_host(float* to) const {
    if (stored_.size() != spec_.rows()) throw error(ExitCode::internal, "{} is on several ranks", spec_.name);
    if (!spec_.is_matrix())
      return copy(to, parameters_.vector(parameter_).weight.data, spec_.rows(), device::Direction::to_host);
    by_pieces(spec_.rows(), spec_.columns(), [&](std::int64_t row, std::int64_t count) {
      kernels::weights_to_float(execution_, parameters_.matrix(parameter_), row,
                                staged_.matrix(count, spec_.columns()));
      copy(to + row * spec_.columns(), staged_.data(), count * spec_.columns(), device::Direction::to_host);
    });
  }

 private:
  void copy(float* to, const float* from, std::int64_t count, device::Direction direction) const {
    device::copy(execution_, to, from, 4 * count, direction);
    kernels::fence(execution_);
  }
  const model::Parameters& parameters_;
  const std::size_t parameter_;
  const ParameterSpec& spec_;
  const parallel::Range stored_;
  const kernels::Execution execution_;
  device::Buffer<float> staged_;
};

/// Position of element (output, input) of a parameter in its tensor and in the array that Parameters store. A vector
/// has one input.
class Layout {
 public:
  Layout(const ParameterSpec& spec, const Place& place)
      : place_(place), outputs_(spec.shape[0]), inputs_(spec.is_matrix() ? spec.shape[1] : 1) {
    const std::int64_t columns = place.shape.size() == 2 ? place.shape[1] : 1;
    tensor_output_ = place.inputs_first ? 1 : columns;
    tensor_input_ = place.inputs_first ? columns : 1;
    own_output_ = spec.transposed() ? 1 : inputs_;
    own_input_ = spec.transposed() ? outputs_ : 1;
  }
  /// Index of an element in the own array.
  std::int64_t own(std::int64_t output, std::int64_t input) const { return output * own_output_ + input * own_input_; }
  /// Calls each(index in the tensor, index in the own array), along the rows of the tensor.
  template <class Each>
  void for_each(const Each& each) const {
    const auto element = [&](std::int64_t output, std::int64_t input) {
      each(place_.output(output) * tensor_output_ + input * tensor_input_, own(output, input));
    };
    if (place_.inputs_first) {
      for (std::int64_t input = 0; input < inputs_; ++input)
        for (std::int64_t output = 0; output < outputs_; ++output) element(output, input);
    } else {
      for (std::int64_t output = 0; output < outputs_; ++output)
        for (std::int64_t input = 0; input < inputs_; ++input) element(output, input);
    }
  }

 private:
  const Place& place_;
  std::int64_t outputs_, inputs_;
  std::int64_t tensor_output_, tensor_input_;  // strides
  std::int64_t own_output_, own_input_;
};

}  // namespace

HuggingfaceConfig read_config_of(const fs::path& directory) {
  return read_config(read_file(directory / kConfig), (directory / kConfig).string());
}

bool is_huggingface_directory(const fs::path& path) {
  const auto has = [&](const char* name) { return fs::exists(path / name); };
  if (!has(kConfig)) return false;
  if (has(kWeights) || has(kIndex) || has("pytorch_model.bin") || has("pytorch_model.bin.index.json")) return true;
  // Parts without their index.
  std::error_code failed;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, failed))
    if (const std::string name = entry.path().filename().string(); name.starts_with("model-") && parts_in(name) > 0)
      return true;
  return false;
}

HuggingfaceDirectory::HuggingfaceDirectory(fs::path path) : path_(std::move(path)) {
  config_ = read_config_of(path_);
  if (fs::exists(path_ / kIndex) && fs::exists(path_ / kWeights))
    throw error(ExitCode::usage, "{}: has {} and {} (which may differ); remove one of them", path_.string(), kWeights,
                kIndex);
  if (fs::exists(path_ / kIndex)) {
    open_parts(path_ / kIndex);
  } else if (fs::exists(path_ / kWeights)) {
    files_.emplace_back((path_ / kWeights).string());
    for (const storage::SafetensorsEntry& entry : files_.front().entries())
      tensors_.emplace(entry.name, Stored{0, entry});
  } else {
    throw error(ExitCode::usage,
                "{}: has neither {} nor {} (only safetensors files are read, and parts need their index); convert its "
                "weights, or complete the directory",
                path_.string(), kWeights, kIndex);
  }
  check();
}

void HuggingfaceDirectory::open_parts(const fs::path& index) {
  const SortedJson file = parse_json<SortedJson>(read_file(index));
  const auto map = file.is_object() ? file.find("weight_map") : file.end();
  if (file.is_discarded() || !file.is_object() || map == file.end() || !map->is_object())
    throw error(ExitCode::data, "{}: has no object \"weight_map\"; is it complete?", index.string());
  std::map<std::string, std::size_t> numbers;
  for (const auto& [tensor, part] : map->items()) {
    const std::string part_name = part.is_string() ? part.get<std::string>() : "";
    if (part_name.empty() || part_name.find('/') != std::string::npos || !part_name.ends_with(".safetensors"))
      throw error(ExitCode::data,
                  "{}: tensor \"{}\" is in \"{}\" (the name of a safetensors file in the same directory "
                  "is needed)",
                  index.string(), printable(tensor), printable(part_name));
    const auto [at, is_new] = numbers.emplace(part_name, files_.size());
    if (is_new) {
      if (files_.size() == kMostFiles)
        throw error(ExitCode::data, "{}: names more than {} files", index.string(), kMostFiles);
      if (!fs::exists(path_ / part_name))
        throw error(ExitCode::data, "{}: names {}, which does not exist; was the directory copied completely?",
                    index.string(), printable(part_name));
      files_.emplace_back((path_ / part_name).string());
    }
    const storage::SafetensorsEntry* const entry = files_[at->second].find(tensor);
    if (entry == nullptr)
      throw error(ExitCode::data, "{}: has no tensor \"{}\", which {} places there", files_[at->second].path(),
                  printable(tensor), kIndex);
    tensors_.emplace(tensor, Stored{at->second, *entry});
  }
  // Nothing of the parts is left out, and no part.
  for (const auto& [part_name, number] : numbers) {
    if (const std::size_t parts = parts_in(part_name); parts != 0 && parts != files_.size())
      throw error(ExitCode::data, "{}: places tensors in {} files, {} is one of {}; is it complete?", index.string(),
                  files_.size(), printable(part_name), parts);
    for (const storage::SafetensorsEntry& entry : files_[number].entries())
      if (const auto listed = tensors_.find(entry.name); listed == tensors_.end() || listed->second.file != number)
        throw error(ExitCode::data, "{}: tensor \"{}\" is not placed there by {}; do the files belong together?",
                    files_[number].path(), printable(entry.name), kIndex);
  }
}

Architecture HuggingfaceDirectory::architecture(std::int64_t length) const {
  if (config_.model.position == Position::learned && length > config_.positions)
    throw collective_error(ExitCode::usage,
                           "{}: sequences of {} tokens (the model has {} learned positions); take a smaller "
                           "data.sequence",
                           path_.string(), length, config_.positions);
  return {.model = config_.model,
          .vocabulary = config_.vocabulary,
          .positions = length,
          .context = config_.positions,
          .family = std::string(config_.family->name)};
}

void HuggingfaceDirectory::require(const ModelSettings& settings) const {
  ModelSettings own = config_.model;
  own.preset = settings.preset;  // fills in keys that are compared
  own.dropout = settings.dropout;
  own.attention_dropout = settings.attention_dropout;
  own.sparse_blocks = settings.sparse_blocks;
  own.sparse_local = settings.sparse_local;
  std::istringstream needed(table_of(own)), found(table_of(settings));
  std::string differences;
  for (std::string a, b; std::getline(needed, a) && std::getline(found, b);)
    if (a != b) differences += fmt::format("\n  {}", a);
  if (!differences.empty())
    throw collective_error(ExitCode::usage,
                           "language_model.initial = \"{}\": its model has other sizes or options; set "
                           "in [language_model]:{}",
                           path_.string(), differences);
}

const HuggingfaceDirectory::Stored& HuggingfaceDirectory::stored(const Place& place) const {
  std::string_view name = place.tensor;
  if (name.starts_with(prefix_)) name.remove_prefix(prefix_.size());
  auto found = tensors_.find(name);
  if (found == tensors_.end() && !place.other.empty()) found = tensors_.find(place.other);
  if (found == tensors_.end())
    throw error(ExitCode::data, "{}: tensor \"{}\" is missing ({} has its sizes); is the directory complete?",
                path_.string(), place.tensor, kConfig);
  return found->second;
}

/// Checks names, types and shapes of the tensors, not their values.
void HuggingfaceDirectory::check() {
  // Files of the model without its head have names without the first word.
  const std::string first(config_.family->prefix);
  if (std::none_of(tensors_.begin(), tensors_.end(),
                   [&](const auto& tensor) { return tensor.first.starts_with(first); }))
    prefix_ = first;

  std::set<std::string_view> used;
  for (const Place& place : places(*config_.family, architecture(1))) {
    const auto& [file, entry] = stored(place);
    const std::string where = files_[file].path();
    if (entry.shape != place.shape)
      throw error(ExitCode::data, "{}: tensor \"{}\" has shape {}, a model of the sizes in {} {}", where, entry.name,
                  storage::shape_text(entry.shape), kConfig, storage::shape_text(place.shape));
    if (!entry.type || *entry.type == kernels::Scalar::fp64)
      throw error(ExitCode::usage, "{}: tensor \"{}\" is stored as {} (F32, F16 and BF16 are read); convert it", where,
                  entry.name, printable(entry.dtype));
    used.insert(entry.name);
  }
  const std::string head = config_.model.tied ? stored_head() : "";
  if (!head.empty()) require_same_head(head);
  for (const auto& [tensor, place] : tensors_)
    if (!used.contains(tensor) && !is_redundant(tensor, config_, prefix_) && tensor != head)
      throw error(ExitCode::data, "{}: tensor \"{}\" belongs to no {} of {} layers (its {} has other sizes?)",
                  files_[place.file].path(), printable(tensor), config_.family->name, config_.model.layers, kConfig);
}

/// Name of the tensor of the head; "": there is none.
std::string HuggingfaceDirectory::stored_head() const {
  for (const TensorName& name : config_.family->tensors)
    for (const std::string_view head : {name.library, name.other})
      if (const std::string tensor = fmt::format("{}.weight", head); name.own == "head" && tensors_.contains(tensor))
        return tensor;
  return {};
}

/// Requires that the head of a tied model equals its embedding, if the file contains both.
void HuggingfaceDirectory::require_same_head(const std::string& head_name) const {
  const std::vector<Place> all = places(*config_.family, architecture(1));
  const std::string name = fmt::format("{}.weight", config_.family->tensors.front().library);
  const auto embedding = std::find_if(all.begin(), all.end(), [&](const Place& place) { return place.tensor == name; });
  const Stored &head = tensors_.find(head_name)->second, &tokens = stored(*embedding);
  bool same = head.entry.shape == tokens.entry.shape && head.entry.type && *head.entry.type != kernels::Scalar::fp64;
  std::vector<float> of_head(static_cast<std::size_t>(same ? std::min(kPiece, head.entry.elements()) : 0)),
      of_tokens(of_head.size());
  by_pieces(same ? head.entry.elements() : 0, 1, [&](std::int64_t first, std::int64_t count) {
    files_[head.file].read(head.entry, first, count, of_head.data());
    files_[tokens.file].read(tokens.entry, first, count, of_tokens.data());
    same = same && std::equal(of_head.begin(), of_head.begin() + count, of_tokens.begin());
  });
  if (same) return;
  throw error(ExitCode::usage,
              "{}: tensor \"{}\" is not \"{}\" ({} says that it is: tie_word_embeddings is true{}); set "
              "tie_word_embeddings to false there if the model has a head of its own, or else remove the tensor",
              files_[head.file].path(), head_name, tokens.entry.name, kConfig,
              config_.family->tied_by_default ? ", as it is if it is not given" : "");
}

void HuggingfaceDirectory::load(const model::Parameters& parameters, const kernels::Execution& execution) const {
  // Adapters are not in the directory.
  std::vector<ParameterSpec> specs(parameters.specs().begin(), parameters.specs().end());
  std::erase_if(specs, [&](const ParameterSpec& spec) { return is_adapter(spec); });
  const std::vector<Place> all = places(*config_.family, architecture(1));
  std::vector<float> rows;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::size_t parameter = parameters.index(specs[i].name);
    read_rows(specs[i], all[i], parameters.parts(parameter).held, rows);
    Copy(parameters, parameter, execution).to_device(rows.data());
  }
}

/// Reads the held rows of a parameter, as stored, and of its tensor no more than what lies between them.
void HuggingfaceDirectory::read_rows(const ParameterSpec& spec, const Place& place, parallel::Range held,
                                     std::vector<float>& rows) const {
  const Stored& found = stored(place);
  const Layout layout(spec, place);
  rows.resize(static_cast<std::size_t>(held.size() * spec.columns()));
  if (rows.empty()) return;
  const parallel::Range outputs = spec.transposed() ? parallel::Range{0, spec.shape[0]} : held,
                        inputs = spec.transposed()  ? held
                                 : spec.is_matrix() ? parallel::Range{0, spec.shape[1]}
                                                    : parallel::Range{0, 1};
  const bool by_inputs = place.inputs_first && spec.is_matrix();
  // Rows of the tensor, and the columns of them that are read. Outputs of the tensor ascend with those of the
  // parameter.
  const parallel::Range of_outputs{place.output(outputs.begin), place.output(outputs.end - 1) + 1},
      lines = by_inputs ? inputs : of_outputs, columns = by_inputs ? of_outputs : inputs;
  const std::int64_t width = place.shape.size() == 2 ? place.shape[1] : 1,
                     together = columns.size() == width ? std::max<std::int64_t>(1, kPiece / width) : 1;
  std::vector<float> piece(static_cast<std::size_t>(std::min(together, lines.size()) * columns.size()));
  std::int64_t output = outputs.begin;
  for (std::int64_t line = lines.begin; line < lines.end; line += together) {
    note_progress();
    const parallel::Range read{line, std::min(line + together, lines.end)};
    files_[found.file].read(found.entry, read.begin * width + columns.begin, read.size() * columns.size(),
                            piece.data());
    const auto take = [&](std::int64_t of_line, std::int64_t of_column, std::int64_t own_output, std::int64_t input) {
      const float value =
          piece[static_cast<std::size_t>((of_line - read.begin) * columns.size() + of_column - columns.begin)];
      rows[static_cast<std::size_t>(layout.own(own_output, input) - held.begin * spec.columns())] =
          value + place.offset;
    };
    if (by_inputs) {
      for (std::int64_t input = read.begin; input < read.end; ++input)
        for (std::int64_t own = outputs.begin; own < outputs.end; ++own) take(input, place.output(own), own, input);
    } else {
      for (; output < outputs.end && place.output(output) < read.end; ++output)
        for (std::int64_t input = inputs.begin; input < inputs.end; ++input)
          take(place.output(output), input, output, input);
    }
  }
}

std::optional<Tokenizer> HuggingfaceDirectory::tokenizer() const {
  const fs::path file = tokenizer_file(path_);
  return fs::exists(file) ? std::optional(load_tokenizer(file.string(), {}, "tokenizer")) : std::nullopt;
}

std::string HuggingfaceDirectory::summary() const {
  const ModelSettings& model = config_.model;
  std::map<std::string, std::int64_t> types;
  std::int64_t bytes = 0;
  for (const auto& [tensor, place] : tensors_) {
    ++types[place.entry.dtype];
    bytes += place.entry.end - place.entry.begin;
  }
  std::string stored;
  for (const auto& [type, count] : types) stored += fmt::format("{}{} of {}", stored.empty() ? "" : ", ", count, type);
  const Architecture architecture = this->architecture(1);
  return fmt::format(
      "{}: {} of Hugging Face, {} parameters, vocabulary {}, contexts of {} tokens\n"
      "  tensors: {}; {} in {} file{}; all present\n  tokeniser: {}\n\n{}",
      path_.string(), config_.family->name, format::grouped(parameters_of(architecture)), config_.vocabulary,
      config_.positions, stored, format::binary_bytes_text(bytes), files_.size(), files_.size() == 1 ? "" : "s",
      fs::exists(tokenizer_file(path_)) ? tokenizer_file(path_).filename().string() : "none", table_of(model));
}

// --- Writing --------------------------------------------------------------------------------------------------------

namespace {

std::size_t elements_of(const std::vector<std::int64_t>& shape) {
  std::size_t elements = 1;
  for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
  return elements;
}

/// Tensors of one file.
struct Part {
  std::vector<storage::SafetensorsWriter::Tensor> tensors;
  std::vector<std::vector<std::size_t>> parameters;  // by tensor
  std::int64_t bytes = 0;
};

std::vector<Part> divide(const std::vector<Place>& all, kernels::Scalar type, std::int64_t file_bytes) {
  std::vector<Part> parts(1);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Place& place = all[i];
    if (place.part > 0) {  // follows part 0
      for (Part& part : parts)
        for (std::size_t t = 0; t < part.tensors.size(); ++t)
          if (part.tensors[t].name == place.tensor) part.parameters[t].push_back(i);
      continue;
    }
    const std::int64_t bytes = kernels::bytes_of(type) * static_cast<std::int64_t>(elements_of(place.shape));
    if (parts.back().bytes > 0 && parts.back().bytes + bytes > file_bytes) parts.emplace_back();
    parts.back().tensors.push_back({place.tensor, type, place.shape});
    parts.back().parameters.push_back({i});
    parts.back().bytes += bytes;
  }
  return parts;
}

}  // namespace

void write_huggingface(const model::Parameters& parameters, const Architecture& architecture,
                       const std::optional<Tokenizer>& tokenizer, kernels::Scalar type, std::int64_t file_bytes,
                       const kernels::Execution& execution, const fs::path& directory) {
  const Family& family = family_of(architecture);
  const std::span<const ParameterSpec> specs = parameters.specs();
  const std::vector<Place> all = places(family, architecture);
  const std::vector<Part> parts = divide(all, type, file_bytes);
  storage::write_new_directory(directory, [&](const fs::path& temporary) {
    Json map = Json::object();
    std::int64_t total = 0;
    std::vector<float> tensor, own;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::string file =
          parts.size() == 1 ? kWeights : fmt::format("model-{:05}-of-{:05}.safetensors", p + 1, parts.size());
      storage::SafetensorsWriter writer(temporary / file, parts[p].tensors, {{"format", "pt"}});
      for (std::size_t t = 0; t < parts[p].tensors.size(); ++t) {
        for (const std::size_t i : parts[p].parameters[t]) {
          own.resize(static_cast<std::size_t>(specs[i].elements()));
          Copy(parameters, i, execution).to_host(own.data());
          tensor.resize(elements_of(all[i].shape));
          Layout(specs[i], all[i]).for_each([&](std::int64_t to, std::int64_t from) {
            const float value = own[static_cast<std::size_t>(from)];
            if (!std::isfinite(value))
              throw error(ExitCode::numeric, "{} has values that are not finite; nothing was written", specs[i].name);
            tensor[static_cast<std::size_t>(to)] = value - all[i].offset;
          });
        }
        by_pieces(std::ssize(tensor), 1, [&](std::int64_t first, std::int64_t count) {
          writer.write(t, first, {tensor.data() + first, static_cast<std::size_t>(count)});
        });
        map[parts[p].tensors[t].name] = file;
      }
      writer.finish();
      total += parts[p].bytes;
    }
    if (parts.size() > 1)
      storage::write_text(temporary / kIndex,
                          json_text(Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}, 2) + "\n");
    if (tokenizer) write_tokenizer_files(*tokenizer, temporary);
    storage::write_text(temporary / kConfig,
                        config_text(architecture, family, type, tokenizer ? tokenizer->special("<|endoftext|>") : -1));
  });
}

}  // namespace weft::language_model

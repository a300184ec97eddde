// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/token_set.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "kernels/array.hpp"
#include "parallel/failure.hpp"
#include "storage/activation_file.hpp"
#include "storage/digest.hpp"
#include "storage/mapped_file.hpp"
#include "storage/token_file.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;

constexpr std::int64_t kFingerprintBytes = std::int64_t{1} << 20;
constexpr std::int64_t kSamples = 64;
constexpr std::int64_t kSampleBytes = 4096;
constexpr std::int64_t kIdsChecked = std::int64_t{1} << 20;  // ids checked at a time

/// A file of llm.c: 256 int32, then the ids.
struct ForeignFormat {
  std::int32_t magic, version;
  Scalar type;
  std::int64_t vocabulary;
  std::uint32_t document_start;  ///< the id with which llm.c begins every document
  const char* model;
};
constexpr ForeignFormat kForeign[] = {{20240520, 1, Scalar::u16, 50257, 50256, "GPT-2"},
                                      {20240801, 7, Scalar::u32, 128256, 128000, "Llama 3"}};
constexpr std::int64_t kForeignHeader = 256 * 4;

constexpr unsigned char kHdf5Signature[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);  // the bytes in a file are not aligned
  return value;
}

/// Ids that are contiguous in memory.
struct Shard {
  std::shared_ptr<const storage::MappedFile> file;  ///< null: in memory
  std::string name;
  const std::byte* ids = nullptr;
  Scalar type = Scalar::u16;
  std::int64_t begin = 0;  ///< position of the first id in the set
  std::int64_t count = 0;
  const std::byte* documents = nullptr;  ///< int64, ascending from 0; null: by `document_start`
  std::int64_t n_documents = 0;
  const std::byte* counted = nullptr;  ///< uint8; null: all count
  std::int64_t document_start = -1;    ///< id that begins a document; -1: one document
  std::int64_t text_bytes = 0;

  std::uint32_t id(std::int64_t i) const {
    return type == Scalar::u16 ? load<std::uint16_t>(ids + 2 * i) : load<std::uint32_t>(ids + 4 * i);
  }
  std::int64_t document(std::int64_t i) const { return load<std::int64_t>(documents + 8 * i); }
  std::int64_t bytes() const { return count * kernels::bytes_of(type); }
};

bool has_extension(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".h5" || extension == ".hdf5" || extension == ".bin";
}

void check_documents(const Shard& shard) {
  if (shard.document(0) != 0)
    throw error(ExitCode::data, "{}: /documents begins with {} (the first document starts at token 0); is it damaged?",
                shard.name, shard.document(0));
  for (std::int64_t i = 1; i < shard.n_documents; ++i)
    if (shard.document(i) <= shard.document(i - 1) || shard.document(i) >= shard.count)
      throw error(ExitCode::data,
                  "{}: /documents [{}] is {} after {} (offsets ascend and are below the number of tokens, {}); is the "
                  "file damaged?",
                  shard.name, i, shard.document(i), shard.document(i - 1), shard.count);
}

}  // namespace

struct TokenSet::Store {
  std::string name, tokenizer;
  std::int64_t vocabulary = 0;
  std::vector<Shard> shards;
  std::vector<std::uint16_t> narrow;
  std::vector<std::uint32_t> wide;
  TokenMarks marks;

  std::int64_t size() const { return shards.back().begin + shards.back().count; }
  /// The shard that has this position.
  std::size_t shard_of(std::int64_t position) const {
    const auto after = std::upper_bound(shards.begin(), shards.end(), position,
                                        [](std::int64_t at, const Shard& shard) { return at < shard.begin; });
    return static_cast<std::size_t>(after - shards.begin()) - 1;
  }
  /// Calls visit(shard, first, i, n) for the parts of `count` positions from `begin` on: n positions of the shard from
  /// its position `first` on are those from `begin` + i on.
  template <class Visit>
  void for_parts(std::int64_t begin, std::size_t count, const Visit& visit) const {
    std::size_t done = 0;
    for (std::size_t s = shard_of(begin); done < count; ++s) {
      const Shard& shard = shards[s];
      if (shard.file) shard.file->require_whole();
      const std::int64_t first = begin + static_cast<std::int64_t>(done) - shard.begin;
      const std::size_t n = std::min(count - done, static_cast<std::size_t>(shard.count - first));
      visit(shard, first, done, n);
      done += n;
    }
  }
};

namespace {

Shard read_hdf5(std::shared_ptr<const storage::MappedFile> file, TokenSet::Store& store) {
  storage::TokenHeader header = storage::read_token_header(file->path());
  const std::byte* const bytes = file->bytes().data();
  // The file could have been replaced between its opening for the header and for mapping.
  for (const storage::StoredArray& array : {header.tokens, header.documents, header.counted})
    if (array.offset + array.count * kernels::bytes_of(array.type) > static_cast<std::int64_t>(file->bytes().size()))
      throw error(ExitCode::data, "{}: changed while it was opened; start again", file->path());
  Shard shard;
  shard.ids = bytes + header.tokens.offset;
  shard.type = header.tokens.type;
  shard.count = header.tokens.count;
  shard.documents = bytes + header.documents.offset;
  shard.n_documents = header.documents.count;
  if (header.counted.count > 0) shard.counted = bytes + header.counted.offset;
  shard.text_bytes = header.text_bytes;
  store.vocabulary = header.vocabulary;
  store.tokenizer = std::move(header.tokenizer);
  return shard;
}

Shard read_foreign(const std::shared_ptr<const storage::MappedFile>& file, TokenSet::Store& store) {
  const auto bytes = static_cast<std::int64_t>(file->bytes().size());
  const std::byte* const data = file->bytes().data();
  if (bytes < kForeignHeader)
    throw error(ExitCode::data, "{}: has {} bytes (a token file of llm.c begins with {}); is it truncated?",
                file->path(), bytes, kForeignHeader);
  const auto magic = load<std::int32_t>(data), version = load<std::int32_t>(data + 4);
  const auto count = static_cast<std::int64_t>(load<std::uint32_t>(data + 8));
  const auto known = std::find_if(std::begin(kForeign), std::end(kForeign), [&](const ForeignFormat& format) {
    return format.magic == magic && format.version == version;
  });
  if (known == std::end(kForeign))
    throw error(
        ExitCode::data,
        "{}: begins with {} {} (token files of llm.c with 20240520 1 or 20240801 7); is it another kind of file?",
        file->path(), magic, version);
  const std::int64_t expected = kForeignHeader + count * kernels::bytes_of(known->type);
  if (count < 1 || bytes != expected)
    throw error(ExitCode::data, "{}: claims {} tokens ({} bytes with its header) and has {} bytes; is it truncated?",
                file->path(), count, expected, bytes);
  Shard shard;
  shard.ids = data + kForeignHeader;
  shard.type = known->type;
  shard.count = count;
  shard.document_start = known->document_start;
  store.vocabulary = known->vocabulary;
  return shard;
}

bool is_hdf5(const storage::MappedFile& file) {
  return file.bytes().size() >= sizeof kHdf5Signature &&
         std::memcmp(file.bytes().data(), kHdf5Signature, sizeof kHdf5Signature) == 0;
}

std::vector<std::string> token_files(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::string> files;
  std::error_code failure;
  for (std::filesystem::directory_iterator entry(path, failure), end; !failure && entry != end;
       entry.increment(failure))
    if (has_extension(entry->path())) files.push_back(entry->path().string());
  if (failure) throw error(ExitCode::data, "{}: cannot be listed ({})", path, failure.message());
  if (files.empty())
    throw error(ExitCode::data,
                "{}: no token files found (no file *.h5, *.hdf5 or *.bin); write them with weft lm tokenize", path);
  std::sort(files.begin(), files.end());
  return files;
}

template <class Id>
void set_ids(std::vector<Id>& kept, std::vector<Id> ids, Scalar type, TokenMarks marks, TokenSet::Store& store) {
  if (ids.empty()) throw error(ExitCode::data, "{}: has no tokens; is it empty?", store.name);
  kept = std::move(ids);
  Shard shard;
  shard.name = store.name;
  shard.ids = reinterpret_cast<const std::byte*>(kept.data());
  shard.type = type;
  shard.count = static_cast<std::int64_t>(kept.size());
  store.marks = std::move(marks);
  if (!store.marks.documents.empty()) {
    shard.documents = reinterpret_cast<const std::byte*>(store.marks.documents.data());
    shard.n_documents = static_cast<std::int64_t>(store.marks.documents.size());
  }
  WEFT_ASSERT(store.marks.counted.empty() || store.marks.counted.size() == kept.size());
  WEFT_ASSERT(store.marks.owners.empty() || store.marks.owners.size() == store.marks.documents.size());
  if (!store.marks.counted.empty()) shard.counted = reinterpret_cast<const std::byte*>(store.marks.counted.data());
  store.shards.push_back(std::move(shard));
}

}  // namespace

TokenSet::TokenSet(std::shared_ptr<const Store> store, std::int64_t begin, std::int64_t end, std::int64_t text_bytes)
    : store_(std::move(store)), begin_(begin), end_(end), text_bytes_(text_bytes) {}

TokenSet::TokenSet(std::string name, std::vector<std::uint16_t> ids, std::int64_t vocabulary, std::int64_t text_bytes,
                   TokenMarks marks)
    : text_bytes_(text_bytes) {
  auto store = std::make_shared<Store>();
  store->name = std::move(name);
  store->vocabulary = vocabulary;
  set_ids(store->narrow, std::move(ids), Scalar::u16, std::move(marks), *store);
  end_ = store->size();
  store_ = std::move(store);
}

TokenSet::TokenSet(std::string name, std::vector<std::uint32_t> ids, std::int64_t vocabulary, std::int64_t text_bytes,
                   TokenMarks marks)
    : text_bytes_(text_bytes) {
  auto store = std::make_shared<Store>();
  store->name = std::move(name);
  store->vocabulary = vocabulary;
  set_ids(store->wide, std::move(ids), Scalar::u32, std::move(marks), *store);
  end_ = store->size();
  store_ = std::move(store);
}

TokenSet TokenSet::open(const std::string& path) {
  auto store = std::make_shared<Store>();
  store->name = path;
  std::int64_t text_bytes = 0, position = 0;
  bool all_know = true;
  for (const std::string& name : token_files(path)) {
    auto file = std::make_shared<const storage::MappedFile>(name);
    Store header;
    Shard shard = is_hdf5(*file) || std::filesystem::path(name).extension() != ".bin" ? read_hdf5(file, header)
                                                                                      : read_foreign(file, header);
    shard.name = name;
    shard.file = std::move(file);
    shard.begin = position;
    if (shard.documents != nullptr) check_documents(shard);
    if (store->shards.empty()) {
      store->vocabulary = header.vocabulary;
      store->tokenizer = std::move(header.tokenizer);
    } else if (header.vocabulary != store->vocabulary || header.tokenizer != store->tokenizer) {
      throw error(ExitCode::data,
                  "{}: was written with another tokeniser than {} (all files of a set have one; vocabularies of {} and "
                  "{}); were two sets mixed?",
                  name, store->shards.front().name, header.vocabulary, store->vocabulary);
    }
    position += shard.count;
    text_bytes += shard.text_bytes;
    all_know = all_know && shard.text_bytes > 0;
    store->shards.push_back(std::move(shard));
    note_progress();
  }
  return TokenSet(std::move(store), 0, position, all_know ? text_bytes : 0);
}

const std::string& TokenSet::name() const { return store_->name; }
std::int64_t TokenSet::vocabulary() const { return store_->vocabulary; }
std::int64_t TokenSet::text_bytes() const { return text_bytes_; }
const std::string& TokenSet::tokenizer() const { return store_->tokenizer; }
std::int64_t TokenSet::n_files() const {
  return store_->shards.front().file ? static_cast<std::int64_t>(store_->shards.size()) : 0;
}

void TokenSet::read(std::int64_t begin, std::span<std::uint32_t> out) const {
  store_->for_parts(
      begin_ + begin, out.size(), [&](const Shard& shard, std::int64_t first, std::size_t filled, std::size_t n) {
        const auto copy = [&]<class Id>(Id) {
          const std::byte* const ids = shard.ids + first * static_cast<std::int64_t>(sizeof(Id));
          std::uint32_t largest = 0;
          for (std::size_t i = 0; i < n; ++i) {
            out[filled + i] = load<Id>(ids + i * sizeof(Id));
            largest = std::max(largest, out[filled + i]);
          }
          return largest;
        };
        const std::uint32_t largest = shard.type == Scalar::u16 ? copy(std::uint16_t{}) : copy(std::uint32_t{});
        if (static_cast<std::int64_t>(largest) >= store_->vocabulary) {
          std::size_t i = filled;
          while (static_cast<std::int64_t>(out[i]) < store_->vocabulary) ++i;
          throw error(ExitCode::data,
                      "{}: token {} is {} (the vocabulary has {}); was it written with another tokeniser?", shard.name,
                      first + static_cast<std::int64_t>(i - filled), out[i], store_->vocabulary);
        }
      });
}

void TokenSet::document_starts(std::int64_t begin, std::int64_t end, std::vector<std::int64_t>& starts) const {
  starts.clear();
  const std::int64_t from = begin_ + begin, to = begin_ + end;
  for (std::size_t s = store_->shard_of(from); s < store_->shards.size() && store_->shards[s].begin < to; ++s) {
    const Shard& shard = store_->shards[s];
    if (shard.file) shard.file->require_whole();
    const std::int64_t last = std::min(to - shard.begin, shard.count);
    // The first id of a shard always starts a document.
    if (shard.begin > from) starts.push_back(shard.begin - from);
    const std::int64_t first = std::max<std::int64_t>(from - shard.begin, 0) + 1;
    if (shard.documents != nullptr) {
      std::int64_t low = 0, high = shard.n_documents;  // first document at or after `first`
      while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if (shard.document(middle) < first)
          low = middle + 1;
        else
          high = middle;
      }
      for (; low < shard.n_documents && shard.document(low) < last; ++low)
        starts.push_back(shard.begin + shard.document(low) - from);
    } else if (shard.document_start >= 0) {
      for (std::int64_t i = first; i < last; ++i)
        if (static_cast<std::int64_t>(shard.id(i)) == shard.document_start) starts.push_back(shard.begin + i - from);
    }
  }
}

bool TokenSet::has_documents() const {
  const Shard& first = store_->shards.front();
  return first.documents != nullptr || first.document_start >= 0;
}

std::vector<std::int64_t> TokenSet::owners() const {
  const std::vector<std::int64_t>&all = store_->marks.owners, &documents = store_->marks.documents;
  if (all.empty()) return {};
  const auto first = std::upper_bound(documents.begin(), documents.end(), begin_) - 1 - documents.begin(),
             last = std::lower_bound(documents.begin(), documents.end(), end_) - documents.begin();
  return {all.begin() + first, all.begin() + last};
}

bool TokenSet::has_counted() const {
  return !all_count_ && std::any_of(store_->shards.begin(), store_->shards.end(),
                                    [](const Shard& shard) { return shard.counted != nullptr; });
}

void TokenSet::read_counted(std::int64_t begin, std::span<std::uint8_t> out) const {
  std::fill(out.begin(), out.end(), std::uint8_t{1});
  if (all_count_) return;
  store_->for_parts(
      begin_ + begin, out.size(), [&](const Shard& shard, std::int64_t first, std::size_t filled, std::size_t n) {
        if (shard.counted != nullptr) std::memcpy(out.data() + filled, shard.counted + first, n);
        for (std::size_t i = filled; i < filled + n; ++i)
          if (out[i] > 1)
            throw error(ExitCode::data,
                        "{}: /counted [{}] is {} (1: the token counts in the loss, 0: not); is it damaged?", shard.name,
                        first + static_cast<std::int64_t>(i - filled), out[i]);
      });
}

TokenSet TokenSet::counting_all() const {
  TokenSet all = *this;
  all.all_count_ = true;
  return all;
}

TokenSet TokenSet::part(std::int64_t begin, std::int64_t end, std::int64_t text_bytes) const {
  TokenSet part = *this;
  part.begin_ = begin_ + begin;
  part.end_ = begin_ + end;
  part.text_bytes_ = text_bytes;
  return part;
}

void TokenSet::check() const {
  std::vector<std::uint32_t> piece(static_cast<std::size_t>(std::min(kIdsChecked, size())));
  std::vector<std::uint8_t> counted(has_counted() ? piece.size() : 0);
  for (std::int64_t begin = 0; begin < size(); begin += kIdsChecked) {
    const auto n = static_cast<std::size_t>(std::min(kIdsChecked, size() - begin));
    read(begin, std::span(piece).first(n));
    if (!counted.empty()) read_counted(begin, std::span(counted).first(n));
    note_progress();
  }
}

std::string TokenSet::fingerprint() const {
  if (n_files() == 0) return "";
  std::string ends, rows;
  for (const Shard& shard : store_->shards) {
    shard.file->require_whole();
    const auto digest_of = [](const std::byte* from, std::int64_t bytes) {
      return storage::sha256({reinterpret_cast<const char*>(from), static_cast<std::size_t>(bytes)}) + "\n";
    };
    const auto digest = [&](std::int64_t offset, std::int64_t bytes) { return digest_of(shard.ids + offset, bytes); };
    ends += fmt::format("{} {} {} {} {}\n", std::filesystem::path(shard.name).filename().string(),
                        shard.file->bytes().size(), shard.count, kernels::bytes_of(shard.type), shard.n_documents);
    const std::int64_t end = std::min(kFingerprintBytes, shard.bytes());
    ends += digest(0, end) + digest(shard.bytes() - end, end);
    const std::int64_t piece = std::min(kSampleBytes, shard.bytes());
    for (std::int64_t i = 0; i < kSamples; ++i) rows += digest((shard.bytes() - piece) / kSamples * i, piece);
    if (shard.counted != nullptr) {
      const std::int64_t marks = std::min(kFingerprintBytes, shard.count);
      ends += "counted " + digest_of(shard.counted, marks) + digest_of(shard.counted + shard.count - marks, marks);
    }
    note_progress();
  }
  ends += fmt::format("{} {}\n", store_->vocabulary, store_->tokenizer);
  return fmt::format("ends:{},rows:{}", storage::sha256(ends), storage::sha256(rows));
}

std::string TokenSet::summary() const {
  std::string text = fmt::format("{}: tokens\n", printable(store_->name));
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<13} {}\n", name, value);
  };
  line("tokens", fmt::format("{}, ids below {}", size(), store_->vocabulary));
  if (text_bytes_ > 0)
    line("text", fmt::format("{} bytes, {:.3f} per token", text_bytes_,
                             static_cast<double>(text_bytes_) / static_cast<double>(size())));
  if (n_files() == 0) return text;
  std::int64_t documents = 0;
  bool known = true;
  for (const Shard& shard : store_->shards) {
    documents += shard.n_documents;
    known = known && shard.n_documents > 0;
  }
  line("files", fmt::format("{}, ids of {} bits", n_files(), 8 * kernels::bytes_of(store_->shards.front().type)));
  if (known) line("documents", std::to_string(documents));
  if (has_counted()) line("loss", "on the tokens that /counted marks (data.loss_on)");
  line("tokeniser", store_->tokenizer.empty() ? "not stored" : "stored");
  line("fingerprint", fingerprint());
  return text;
}

bool is_token_file(const std::string& path) {
  if (has_extension(path)) return true;
  const storage::MappedFile file(path);
  if (is_hdf5(file)) return true;
  if (file.bytes().size() < 4) return false;
  const auto magic = load<std::int32_t>(file.bytes().data());
  return std::any_of(std::begin(kForeign), std::end(kForeign),
                     [&](const ForeignFormat& format) { return format.magic == magic; });
}

bool holds_tokens(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return is_token_file(path);
  bool tokens = false, activations = false;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    tokens = tokens || has_extension(entry.path());
    const std::string name = entry.path().filename().string();
    activations = activations || name.starts_with("chunk_") || name.starts_with("activations_") ||
                  storage::is_crosslayer_transcoder_file(entry.path());
  }
  return tokens && !activations;
}

TokenSet open_tokens(const parallel::World& world, const std::string& path) {
  parallel::note_phase("opening the token files");
  std::optional<TokenSet> set;
  const std::string expected = world.on_root([&]() -> std::string {
    set = TokenSet::open(path);
    return set->fingerprint();
  });
  parallel::on_all(world.all(), [&] {
    if (!set) set = TokenSet::open(path);
    if (set->fingerprint() != expected)
      throw error(ExitCode::data, "{}: differs from the files that rank 0 found there; is another disk mounted?", path);
  });
  return *set;
}

}  // namespace weft::dataset

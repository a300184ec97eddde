// SPDX-License-Identifier: Apache-2.0
//
// Runs a fuzz target without libFuzzer, with any compiler: every file of the corpus, then reproducible mutations of
// them, identified by their number.
//
//   fuzz_TARGET [--mutations N] [--only N] [--save FILE] FILE|DIRECTORY...
//
// A crash prints "at mutation N" or "at FILE". --only N --save FILE writes that input to a file.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <vector>

#include "kernels/random.hpp"
#include "tests/fuzz/target.hpp"

// Defined by the address sanitizer, if it is linked.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*)());

namespace weft::fuzz {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

char now[512] = "";  // the current input, for the message of a crash

void report_crash() {
  if (now[0] == '\0') return;
  const ssize_t ignored = ::write(STDERR_FILENO, now, std::strlen(now));
  static_cast<void>(ignored);
}

void on_signal(int signal) {
  report_crash();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(const std::string& what, const Bytes& bytes) {
  std::snprintf(now, sizeof now, "at %s\n", what.c_str());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  now[0] = '\0';
}

/// The sequence of random words of one mutation.
class Words {
 public:
  explicit Words(std::uint64_t number) : number_(number) {}
  std::uint64_t next() {
    const kernels::Random4 r = kernels::philox(0, kernels::Purpose::test, number_, count_++);
    return std::uint64_t{r.word[0]} << 32 | r.word[1];
  }
  /// In [0, n), n > 0.
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

 private:
  std::uint64_t number_, count_ = 0;
};

/// One to eight changes to a file of the corpus: flipped bits, replaced bytes, extreme numbers, deleted, duplicated and
/// inserted pieces.
Bytes mutation(const std::vector<Bytes>& corpus, std::uint64_t number) {
  Words words(number);
  Bytes bytes = corpus[words.below(corpus.size())];
  for (std::size_t changes = 1 + words.below(8); changes > 0; --changes) {
    const std::size_t at = words.below(bytes.size() + 1), length = 1 + words.below(16);
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), at + length));
    switch (words.below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] ^= static_cast<std::uint8_t>(1u << words.below(8));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<std::uint8_t>(words.next());
        break;
      case 2: {
        constexpr std::uint64_t extreme[] = {0,      1,          0x7f,       0xff,       0x7fff,
                                             0xffff, 0x7fffffff, 0xffffffff, ~0ull >> 1, ~0ull};
        const std::uint64_t value = extreme[words.below(std::size(extreme))];
        const std::size_t width = std::size_t{1} << words.below(4);
        for (std::size_t i = 0; i < width && at + i < bytes.size(); ++i)
          bytes[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
        break;
      }
      case 3:
        bytes.erase(place, end);
        break;
      case 4: {
        const Bytes piece(place, end);
        bytes.insert(place, piece.begin(), piece.end());
        break;
      }
      default: {
        const Bytes& other = corpus[words.below(corpus.size())];
        const std::size_t from = words.below(other.size() + 1), n = std::min(other.size() - from, 4 * length);
        bytes.insert(place, other.begin() + static_cast<std::ptrdiff_t>(from),
                     other.begin() + static_cast<std::ptrdiff_t>(from + n));
      }
    }
  }
  return bytes;
}

Bytes load(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) finding(path.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

int replay(const std::vector<std::string>& arguments) {
  std::uint64_t mutations = 0, only = 0;
  std::string save;
  std::vector<fs::path> paths;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool more = i + 1 < arguments.size();
    if (arguments[i] == "--mutations" && more)
      mutations = std::stoull(arguments[++i]);
    else if (arguments[i] == "--only" && more)
      only = std::stoull(arguments[++i]);
    else if (arguments[i] == "--save" && more)
      save = arguments[++i];
    else if (fs::is_directory(arguments[i]))
      for (const auto& entry : fs::recursive_directory_iterator(arguments[i])) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
      }
    else
      paths.emplace_back(arguments[i]);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const fs::path& path : paths) corpus.push_back(load(path));
  if (corpus.empty()) finding("no corpus");
  if (only > 0) {
    const Bytes bytes = mutation(corpus, only);
    if (!save.empty()) write_file(save, bytes.data(), bytes.size());
    run(fmt::format("mutation {}", only), bytes);
    return 0;
  }
  for (std::size_t i = 0; i < corpus.size(); ++i) run(paths[i].string(), corpus[i]);
  for (std::uint64_t number = 1; number <= mutations; ++number)
    run(fmt::format("mutation {}", number), mutation(corpus, number));
  std::printf("%zu files, %llu mutations: no finding\n", corpus.size(), static_cast<unsigned long long>(mutations));
  return 0;
}

}  // namespace
}  // namespace weft::fuzz

int main(int argc, char** argv) {
  std::signal(SIGABRT, weft::fuzz::on_signal);
  if (__sanitizer_set_death_callback != nullptr)
    __sanitizer_set_death_callback(weft::fuzz::report_crash);
  else
    std::signal(SIGSEGV, weft::fuzz::on_signal);
  return weft::fuzz::replay({argv + 1, argv + argc});
}

// SPDX-License-Identifier: Apache-2.0
//
// manifest.json of a checkpoint, also with a corrected sha256, since otherwise every mutation is rejected there. The
// text of an accepted manifest must be accepted and reproduce itself.
#include "checkpoint/manifest.hpp"
#include "storage/digest.hpp"
#include "tests/fuzz/target.hpp"

namespace {

/// `text` with the sha256 of its content inserted.
std::string with_own_digest(std::string text) {
  constexpr std::string_view kMark = "  \"sha256\": \"";
  constexpr std::size_t kDigits = 64;
  const std::size_t at = text.find(kMark);
  if (at == text.npos || text.size() < at + kMark.size() + kDigits) return text;
  text.replace(at + kMark.size(), kDigits, kDigits, '0');
  return text.replace(at + kMark.size(), kDigits, weft::storage::sha256(text));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string given(fuzz::text(data, size));
  checkpoint::Manifest manifest;
  for (const std::string& text : {given, with_own_digest(given)}) {
    bool accepted = false;
    try {
      accepted = fuzz::accepts({ExitCode::io}, [&] { manifest = checkpoint::parse(text); });
    } catch (const checkpoint::NewerFormat&) {
    }
    if (!accepted) continue;
    const std::string written = checkpoint::to_text(manifest);
    if (checkpoint::to_text(checkpoint::parse(written)) != written)
      fuzz::finding("the text of a manifest does not reproduce itself");
  }
  return 0;
}

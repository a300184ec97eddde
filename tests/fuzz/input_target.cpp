// SPDX-License-Identifier: Apache-2.0
//
// An input file, with the schema of a training run. The first line may be an override. An accepted input must be
// printed as an input with the same values.
#include <algorithm>

#include "input/print.hpp"
#include "input/read.hpp"
#include "tests/fuzz/target.hpp"
#include "transcoder/settings/settings_schema.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  std::string_view given = fuzz::text(data, size);
  std::vector<input::Override> overrides;
  constexpr std::string_view kSet = "# --set ";
  if (given.starts_with(kSet)) {
    const std::size_t end = std::min(given.find('\n'), given.size());
    overrides.push_back({std::string(given.substr(kSet.size(), end - kSet.size())), ""});
    given.remove_prefix(end);
  }

  transcoder::Configuration configuration;
  const input::Schema schema = transcoder::schema(configuration);
  // The text as the input of an interrupted run.
  fuzz::accepts({ExitCode::usage}, [&] { input::changed_keys(schema, given, "old.toml"); });
  if (!fuzz::accepts({ExitCode::usage}, [&] { input::read(schema, given, "input.toml", overrides); })) return 0;

  const std::string printed = input::print(schema);
  transcoder::Configuration again;
  const input::Schema schema_again = transcoder::schema(again);
  if (!fuzz::accepts({ExitCode::usage}, [&] { input::read(schema_again, printed, "printed.toml"); }))
    fuzz::finding("the printed input cannot be read:\n" + printed);
  if (input::print(schema_again) != printed) fuzz::finding("the printed input has other values:\n" + printed);
  if (!input::changed_keys(schema_again, printed, "printed.toml").empty())
    fuzz::finding("an input differs from itself");
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include "base/fault.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.hpp"

namespace weft::fault {
namespace {

struct Order {
  std::string point;
  std::int64_t countdown = 1;
  bool always = false;
  std::int64_t rank = -1;  // -1: any
  std::int64_t step = -1;
  Kind kind = Kind::kill;
};

std::mutex mutex;
std::string ordered = std::getenv("WEFT_FAULT") == nullptr ? "" : std::getenv("WEFT_FAULT");
std::optional<Order> current;

std::int64_t number(const std::string& word, std::int64_t least) {
  char* end = nullptr;
  const long long value = std::strtoll(word.c_str(), &end, 10);
  if (word.empty() || *end != '\0' || value < least)
    throw error(ExitCode::usage, "WEFT_FAULT={}: \"{}\" is not a number >= {} (syntax: point[@n]:rank:step[:kind])",
                ordered, word, least);
  return value;
}

Kind kind_of(const std::string& word) {
  static const std::pair<const char*, Kind> kinds[] = {
      {"kill", Kind::kill}, {"exit", Kind::exit},     {"throw", Kind::throw_error}, {"segfault", Kind::segfault},
      {"stop", Kind::stop}, {"enospc", Kind::enospc}, {"nan", Kind::nan},           {"skip", Kind::skip},
      {"usr1", Kind::usr1}, {"usr2", Kind::usr2},     {"term", Kind::term},         {"int", Kind::interrupt}};
  for (const auto& [name, kind] : kinds)
    if (word == name) return kind;
  throw error(ExitCode::usage,
              "WEFT_FAULT={}: unknown kind \"{}\" (kill, exit, throw, segfault, stop, enospc, nan, skip, usr1, usr2, "
              "term, int)",
              ordered, word);
}

Order read(const std::string& text) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == ':')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  if (parts.size() < 3 || parts.size() > 4)
    throw error(ExitCode::usage, "WEFT_FAULT={}: has {} fields (syntax: point[@n]:rank:step[:kind])", text,
                parts.size());
  Order order;
  const std::size_t at = parts[0].find('@');
  order.point = parts[0].substr(0, at);
  order.always = at != std::string::npos && parts[0].substr(at + 1) == "*";
  if (at != std::string::npos && !order.always) order.countdown = number(parts[0].substr(at + 1), 1);
  if (parts[1] != "*") order.rank = number(parts[1], 0);
  if (parts[2] != "*") order.step = number(parts[2], 0);
  if (parts.size() == 4) order.kind = kind_of(parts[3]);
  return order;
}

}  // namespace

namespace detail {

bool armed = !ordered.empty();
std::atomic<int> rank{0};
std::atomic<std::int64_t> step{0};

Kind fire(std::string_view name, int rank, std::int64_t step) {
  Kind kind = Kind::none;
  {
    const std::lock_guard lock(mutex);
    if (!current) current = read(ordered);
    Order& order = *current;
    if (order.point != name || (order.rank >= 0 && order.rank != rank) || (order.step >= 0 && order.step != step))
      return kind;
    if (!order.always && --order.countdown != 0) return kind;
    kind = order.kind;
  }
  switch (kind) {
    case Kind::kill:
      ::kill(::getpid(), SIGKILL);
      break;
    case Kind::exit:
      ::_exit(1);
    case Kind::segfault:
      std::signal(SIGSEGV, SIG_DFL);  // it may be ignored or handled
      ::raise(SIGSEGV);
      break;
    case Kind::stop:
      ::raise(SIGSTOP);
      break;
    case Kind::throw_error:
      throw error(ExitCode::internal, "injected fault at {} on rank {}, step {}", name, rank, step);
    case Kind::enospc:
      throw error(ExitCode::io, "injected fault at {} on rank {}, step {} (No space left on device)", name, rank, step);
    case Kind::nan:
    case Kind::skip:
      return kind;
    case Kind::usr1:
      ::raise(SIGUSR1);
      break;
    case Kind::usr2:
      ::raise(SIGUSR2);
      break;
    case Kind::term:
      ::raise(SIGTERM);
      break;
    case Kind::interrupt:
      ::raise(SIGINT);
      break;
    case Kind::none:
      break;
  }
  return Kind::none;
}

}  // namespace detail

void order(const std::string& request) {
  const std::lock_guard lock(mutex);
  ordered = request;
  current.reset();
  detail::armed = !request.empty();
}

}  // namespace weft::fault

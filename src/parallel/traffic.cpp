// SPDX-License-Identifier: Apache-2.0
#include "parallel/traffic.hpp"

#include <algorithm>
#include <span>

#include "base/clock.hpp"
#include "base/trace.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

Traffic& Traffic::operator+=(const Traffic& other) {
  bytes_sent += other.bytes_sent;
  seconds += other.seconds;
  calls += other.calls;
  return *this;
}

Traffic& Exchanges::of(std::string_view name) {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const Named& one) { return one.name == name; });
  return found != all_.end() ? found->traffic : all_.emplace_back(Named{std::string(name), {}}).traffic;
}

Traffic Exchanges::total() const {
  Traffic sum;
  for (const Named& one : all_) sum += one.traffic;
  return sum;
}

Exchanges& Exchanges::operator+=(const Exchanges& other) {
  for (const Named& one : other.all_) of(one.name) += one.traffic;
  return *this;
}

Exchanges Exchanges::since(const Exchanges& earlier) const {
  Exchanges before = earlier, difference = *this;
  for (Named& one : difference.all_) one.traffic = one.traffic - before.of(one.name);
  return difference;
}

TimedExchange::TimedExchange(Exchanges& exchanges, std::string_view name, std::int64_t bytes_sent)
    : traffic_(exchanges.of(name)), name_(name), begin_(Clock::now()) {
  traffic_.bytes_sent += bytes_sent;
  ++traffic_.calls;
}

TimedExchange::~TimedExchange() {
  const auto end = Clock::now();
  traffic_.seconds += std::chrono::duration<double>(end - begin_).count();
  if (trace::on()) trace::record(trace::Row::exchanges, name_, begin_, end);
}

std::vector<ExchangeProfile> profile(const Exchanges& exchanges, std::int64_t n_steps, const Communicator& ranks) {
  std::string names;
  for (const Exchanges::Named& one : exchanges.all()) names += one.name + "\n";
  names = ranks.broadcast(names);
  Exchanges own = exchanges;
  const double share = 1.0 / static_cast<double>(std::max<std::int64_t>(1, n_steps) * ranks.size());
  std::vector<ExchangeProfile> means;
  for (std::size_t begin = 0, end = 0; (end = names.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string name = names.substr(begin, end - begin);
    const Traffic traffic = own.of(name);
    double sums[] = {static_cast<double>(traffic.bytes_sent), traffic.seconds, static_cast<double>(traffic.calls)};
    ranks.sum(std::span<double>(sums));
    means.push_back({name, sums[0] * share, sums[1] * share, sums[2] * share});
  }
  return means;
}

}  // namespace weft::parallel

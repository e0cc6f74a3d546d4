#include "mesh/route.h"

#include <algorithm>

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHeadStart{150};  // RFC 8305 advises 250 ms, for the whole internet
constexpr milliseconds kAgainSoon{100};  // after a failure; later less often
constexpr milliseconds kAgain{1000};
constexpr int kSoonTries = 5;
constexpr milliseconds kUnreachableAfter{8000};  // in all, every rank has the error within ten seconds
constexpr milliseconds kEndedAfter{30'000};      // if something listens, but its connections end
constexpr milliseconds kRefusedAfter{1500};      // everywhere
constexpr milliseconds kRefusedAgain{200};       // everywhere, where one was connected
constexpr milliseconds kRefusedPartly{4000};     // no other address answers: three lost packets are not chance
constexpr int kRefusedTries = 3;

}  // namespace

Route::Route(Candidates candidates, Clock::time_point now) : known_(true), left_out_(std::move(candidates.left_out)) {
  for (const SocketAddress& address : candidates.addresses)
    tries_.push_back({.address = address, .begin = {}, .why = {}});
  restart(now);
}

void Route::restart(Clock::time_point now) {
  begin_.reset();
  for (std::size_t i = 0; i < tries_.size(); ++i)
    tries_[i] = {.address = tries_[i].address, .begin = now + kHeadStart * i, .why = {}};
}

void Route::again(Clock::time_point now) {
  restart(now);
  was_connected_ = true;
}

std::optional<std::size_t> Route::due(Clock::time_point now) const {
  for (std::size_t i = 0; i < tries_.size(); ++i)
    if (!tries_[i].running && !tries_[i].final && now >= tries_[i].begin) return i;
  return std::nullopt;
}

std::vector<SocketAddress> Route::addresses() const {
  std::vector<SocketAddress> out;
  for (const Try& it : tries_) out.push_back(it.address);
  return out;
}

// Time counts from here: before, this rank may have waited for the job's store.
void Route::started(std::size_t index, Clock::time_point now) {
  if (!begin_) begin_ = now;
  tries_[index].running = true;
  tries_[index].begin = now;
}

void Route::answered(std::size_t index) { tries_[index].answered = true; }

void Route::failed(std::size_t index, const std::string& why, bool refused, bool final, Clock::time_point now) {
  Try& it = tries_[index];
  it.ended = it.answered && !refused;
  it.running = it.answered = false;
  it.refused = refused;
  it.final = final;
  it.why = why;
  it.begin = now + (++it.failures < kSoonTries || it.ended ? kAgainSoon : kAgain);
  // This address had the head start: the others may follow at once.
  for (Try& next : tries_)
    if (!next.running && next.failures == 0) {
      next.begin = std::min(next.begin, now);
      break;
    }
}

Route::Verdict Route::verdict(Clock::time_point now) const {
  if (!known_) return Verdict::kOpen;
  auto answered = [](const Try& it) { return it.answered; };
  auto refused = [](const Try& it) { return it.refused && it.failures >= kRefusedTries; };
  auto final = [](const Try& it) { return it.final; };
  if (std::all_of(tries_.begin(), tries_.end(), final)) return Verdict::kUnreachable;  // also without any
  if (std::any_of(tries_.begin(), tries_.end(), answered)) return Verdict::kOpen;
  milliseconds took = std::chrono::duration_cast<milliseconds>(now - begin_.value_or(now));
  if (took >= (was_connected_ ? kRefusedAgain : kRefusedAfter) && std::all_of(tries_.begin(), tries_.end(), refused))
    return Verdict::kRefused;
  if (took >= kRefusedPartly && std::any_of(tries_.begin(), tries_.end(), refused)) return Verdict::kRefused;
  const bool ended = std::any_of(tries_.begin(), tries_.end(), [](const Try& it) { return it.ended; });
  return took >= (ended ? kEndedAfter : kUnreachableAfter) ? Verdict::kUnreachable : Verdict::kOpen;
}

std::string Route::text(Clock::time_point now) const {
  std::string out;
  auto add = [&](const std::string& part) { out += (out.empty() ? "" : ", ") + part; };
  for (const Try& it : tries_) {
    auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - it.begin).count();
    std::string state = it.why.empty() ? "not tried" : it.why;
    if (it.running && it.answered)
      state = "connected, but no greeting came for " + std::to_string(seconds) + " s";
    else if (it.running && it.why.empty())
      state = "Connection timed out: no answer for " + std::to_string(seconds) + " s";
    add(it.address.text() + " (" + state + ")");
  }
  for (const std::string& it : left_out_) add(it);
  return out.empty() ? "no address at all" : out;
}

}  // namespace ringdp

#include "mesh/redial_tries.h"

#include <algorithm>

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};  // between two attempts at one address
constexpr milliseconds kLongestPause{200};
constexpr milliseconds kHeadStart{50};  // for the address that was in use
constexpr int kKnockRefusals = 2;       // at one address, while others do not answer
constexpr const char* kAnswered = "it answered";

}  // namespace

void RedialTries::restart(std::size_t addresses, bool dials, Clock::time_point now) {
  dials_ = dials;
  tries_.assign(addresses, Try{.next = now + kHeadStart});
  if (!tries_.empty()) tries_.front().next = now;
}

void RedialTries::begun(std::size_t address, Clock::time_point now) {
  Try& it = tries_[address];
  it.next = now + std::min(kLongestPause, kFirstPause * (1 << std::min(it.failures, 5)));
  ++it.failures;
}

void RedialTries::connected(std::size_t address) {
  tries_[address].refused = false;
  tries_[address].why = dials_ ? "connected, but it did not answer" : kAnswered;
}

void RedialTries::failed(std::size_t address, const std::string& why, bool refused) {
  tries_[address].refused = refused;
  if (!why.empty()) tries_[address].why = why;
}

// Refused at the address that was dialled before, or at all addresses.
bool RedialTries::process_has_ended() const {
  if (tries_.empty()) return false;
  if (std::all_of(tries_.begin(), tries_.end(), [](const Try& it) { return it.refused; })) return true;
  if (dials_) return tries_.front().refused;
  const bool some = std::any_of(tries_.begin(), tries_.end(),
                                [](const Try& it) { return it.refused && it.failures >= kKnockRefusals; });
  const bool other =
      std::any_of(tries_.begin(), tries_.end(), [](const Try& it) { return !it.refused && it.why == kAnswered; });
  return some && !other;
}

std::string RedialTries::text(const std::vector<SocketAddress>& addresses) const {
  std::string out;
  for (std::size_t i = 0; i < tries_.size(); ++i)
    out += (!out.empty() ? ", "
            : dials_     ? "tried "
                         : "it did not come, and asked at ") +
           addresses[i].text() + " (" + (tries_[i].why.empty() ? "no answer" : tries_[i].why) + ")";
  return out.empty() ? "it did not come" : out;
}

}  // namespace ringdp

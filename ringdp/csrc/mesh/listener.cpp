#include "mesh/listener.h"

#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace ringdp {
namespace {

constexpr int kAcceptsPerStep = 256;  // then the other listeners have their turn
constexpr auto kReportEvery = std::chrono::seconds(1);
constexpr auto kPauseForDescriptors = std::chrono::milliseconds(50);
constexpr auto kShortTooLong = std::chrono::seconds(5);

}  // namespace

void Listener::poll_for(std::vector<pollfd>& polled) const {
  const auto events = static_cast<short>(paused() ? 0 : POLLIN);
  for (const TcpListener& it : listeners_) polled.push_back({it.poll_fd(), events, 0});
}

void Listener::let_in(std::size_t listener, const std::function<void(Fd, const SocketAddress&)>& each) {
  for (int i = 0; i < kAcceptsPerStep; ++i) {
    int error_number = 0;
    auto newcomer = listeners_[listener].accept(error_number);
    if (error_number != 0) {
      const auto now = Clock::now();
      accept_after_ = now + kPauseForDescriptors;
      if (!short_since_ || now - short_last_ > std::chrono::seconds(1)) short_since_ = now;  // a new shortage
      short_last_ = now;
      short_of_ = errno_text(error_number);
      report("cannot let a connection in: " + short_of_);
    }
    if (!newcomer) return;
    short_since_.reset();
    each(std::move(newcomer->first), newcomer->second);
  }
}

std::string Listener::shortage() const {
  if (!short_since_ || short_last_ - *short_since_ < kShortTooLong) return "";
  return "no connection could be let in for " + std::to_string(kShortTooLong.count()) + " s: " + short_of_;
}

std::string Listener::turned_away_text() const {
  if (turned_away_ == 0) return "";
  return "turned away " + std::to_string(turned_away_) +
         " connections that could not prove that they belong to this job";
}

void Listener::report(const std::string& line) {
  const auto now = Clock::now();
  if (now < report_after_) {
    ++unreported_;
    return;
  }
  const std::string more = unreported_ > 0 ? " (and " + std::to_string(unreported_) + " more since the last line)" : "";
  log(LogLevel::kWarning, line + more);
  unreported_ = 0;
  report_after_ = now + kReportEvery;
}

}  // namespace ringdp

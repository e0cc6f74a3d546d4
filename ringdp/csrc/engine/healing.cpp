#include "engine/healing.h"

#include <algorithm>
#include <utility>

namespace ringdp {
namespace {

constexpr std::size_t kOften = 5;  // fewer replacements within this time are normal
constexpr auto kOftenWithin = std::chrono::seconds(60);

}  // namespace

Healing::Healing(const DriverRole& role, PeerLinks& links, FailureAgreement& failures, NoticeBoard& notices,
                 const EngineOptions& options)
    : role_(role),
      links_(links),
      failures_(failures),
      notices_(notices),
      options_(options),
      cases_(static_cast<std::size_t>(links.peers().world())) {}

void Healing::on_broken(int peer, const Error& error) {
  role_.assert_held();
  Case& it = cases_[static_cast<std::size_t>(peer)];
  if (it.error) return;  // it heals already: this is the end of the replaced channel
  it.error = error;
  options_.heal_connection(peer, true);
}

void Healing::on_silent(int peer) { options_.heal_connection(peer, false); }

bool Healing::hold(int peer) {
  role_.assert_held();
  Link& link = *links_[peer];
  if (!link.repair().possible()) return false;
  link.repair().hold();
  Case& it = cases_[static_cast<std::size_t>(peer)];
  if (it.error) return true;
  ErrorContext context;
  links_.peers().self().fill_self(context);
  links_.peers().info(peer).fill_peer(context);
  context.cause = "the connection broke";
  context.advice = "look at that rank's own log, and at the network between the two hosts";
  it.error = Error(ErrorKind::kPeerLost, links_.peers().info(peer).text() + ": " + context.cause, context);
  return true;
}

std::optional<uint64_t> Healing::settle(int peer) {
  role_.assert_held();
  Link& link = *links_[peer];
  if (!link.repair().possible() || !link.healing()) return std::nullopt;
  links_.guarded(peer, [](Link& it) {
    it.repair().drain();
    return true;
  });
  failures_.report();
  if (!link.usable()) return std::nullopt;  // the goodbye was read, or the bytes were damaged
  links_.interrupt(peer);
  return link.repair().frames_taken();
}

void Healing::resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) {
  role_.assert_held();
  Link& link = *links_[peer];
  // the peer sees the end of this channel
  if (!link.repair().possible() || !link.healing() || link.connected()) return;
  const int64_t took_ms = link.broken_for_ms();
  std::optional<Error>& error = cases_[static_cast<std::size_t>(peer)].error;
  const auto before = std::exchange(error, std::nullopt);  // it may break again at once
  if (links_.resume(peer, std::move(channel), taken)) return note(peer, took_ms);
  error = before;
  give_up(peer, "it lacks frames that its host, or a proxy on the way, had acknowledged");
}

void Healing::note(int peer, int64_t took_ms) {
  ++healed_;
  Case& it = cases_[static_cast<std::size_t>(peer)];
  const auto now = Clock::now();
  it.healed.push_back(now);
  while (now - it.healed.front() > kOftenWithin) it.healed.pop_front();
  const Link& link = *links_[peer];
  const std::string both = links_.peers().self().text() + " and " + links_.peers().info(peer).text();
  const std::string path = link.connected() ? " (" + link.channel().describe() + ")" : "";
  notices_.post(LogLevel::kInfo, "the connection between " + both + " broke and was made again" + path + ", after " +
                                     std::to_string(took_ms) + " ms; nothing is lost");
  if (it.healed.size() <= kOften || now - it.warned_at < kOftenWithin) return;
  it.warned_at = now;
  notices_.post(LogLevel::kWarning,
                "the connection between " + both + path + " broke " + std::to_string(it.healed.size()) +
                    " times within a minute, and was made again each time: look at the network between them");
}

void Healing::give_up(int peer, const std::string& why) {
  role_.assert_held();
  const Link& link = *links_[peer];
  auto error = std::exchange(cases_[static_cast<std::size_t>(peer)].error, std::nullopt);
  if (link.broken() || link.departed() || !error) return;
  if (!why.empty()) {
    ErrorContext context = error->context();
    context.cause += "; it could not be made again: " + why;
    context.unexplained = false;
    error = Error(error->kind(), links_.peers().info(peer).text() + ": " + context.cause, context);
  }
  failures_.on_lost(peer, *error);
  failures_.report();
}

bool Healing::any() const {
  role_.assert_held();
  const auto links = links_.all();
  return std::any_of(links.begin(), links.end(),
                     [](const auto& link) { return link && link->usable() && link->healing(); });
}

uint64_t Healing::healed() const {
  role_.assert_held();
  return healed_;
}

}  // namespace ringdp

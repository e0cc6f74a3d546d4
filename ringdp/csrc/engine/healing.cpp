#include "engine/healing.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace ringdp {
namespace {

constexpr std::size_t kOften = 5;  // fewer replacements within this time are normal
constexpr auto kOftenWithin = std::chrono::seconds(60);
constexpr uint64_t kArrivesBytes = 1024 * 1024;  // with so many between two failures, a connection is of use

}  // namespace

Healing::Healing(DriverRole& role, PeerLinks& links, FailureAgreement& failures, NoticeBoard& notices,
                 const EngineOptions& options)
    : role_(role),
      links_(links),
      failures_(failures),
      notices_(notices),
      options_(options),
      cases_(static_cast<std::size_t>(links.peers().world())) {}

void Healing::on_broken(int peer, const ConnectionBroken& error) {
  role_.assert_held();
  Case& it = cases_[static_cast<std::size_t>(peer)];
  if (it.error) return;  // it heals already: this is the end of the replaced channel
  if (error.tampered() && hopeless(it, links_[peer]->traffic().received)) {
    ErrorContext context = error.context();
    context.cause +=
        "; so it went for " + std::to_string(options_.heal_ms) + " ms (RINGDP_HEAL) on each new connection";
    return failures_.on_lost(peer,
                             Error(error.kind(), links_.peers().info(peer).text() + ": " + context.cause, context));
  }
  it.error = error;
  options_.heal_connection(peer, true);
}

// One that is tampered with now and then heals; one on which nothing arrives would be made again for ever.
bool Healing::hopeless(Case& it, uint64_t received) const {
  const auto now = Clock::now();
  const auto limit = std::chrono::milliseconds(options_.heal_ms);
  const bool again = it.tampered_since && received - it.received < kArrivesBytes && now - it.tampered_at < limit;
  if (!again) it.tampered_since = now;
  it.tampered_at = now;
  it.received = received;
  return now - *it.tampered_since > limit;
}

void Healing::on_silent(int peer) { options_.heal_connection(peer, false); }

void Healing::run(int peer, const std::function<void(Link& link, Case& it)>& step) {
  role_.run([&] {
    role_.assert_held();
    {
      MutexLock lock(role_.mutex());
      if (role_.closed()) return;
    }
    step(*links_[peer], cases_[static_cast<std::size_t>(peer)]);
  });
}

void Healing::connect(int peer, std::unique_ptr<Channel> channel, bool checksums) {
  run(peer, [&](Link& link, Case&) {
    // no longer wanted: the peer sees the end of this connection
    if (!link.connected() && link.usable()) links_.connect(peer, std::move(channel), checksums);
  });
}

void Healing::cannot_connect(int peer, const Error& error, bool gone) {
  run(peer, [&](Link& link, Case&) {
    role_.assert_held();
    if (link.connected() || !link.usable()) return;
    if (link.healing()) return end(peer, error.context().cause);
    failures_.on_unreachable(peer, error, gone);
    failures_.report();
  });
}

bool Healing::hold(int peer) {
  bool held = false;
  run(peer, [&](Link& link, Case& it) {
    held = link.repair().possible();
    if (!held) return;
    link.repair().hold();
    if (it.error) return;
    it.error =
        loss_of(peer, "the connection broke", "look at that rank's own log, and at the network between the two hosts");
  });
  return held;
}

Error Healing::loss_of(int peer, const std::string& cause, const std::string& advice) const {
  ErrorContext context;
  links_.peers().self().fill_self(context);
  links_.peers().info(peer).fill_peer(context);
  context.cause = cause;
  context.advice = advice;
  return {ErrorKind::kPeerLost, links_.peers().info(peer).text() + ": " + cause, context};
}

void Healing::lose(int peer, const std::string& cause) {
  run(peer, [&](Link& link, Case& it) {
    if (!link.usable()) return;
    it.error.reset();
    failures_.on_lost(peer, loss_of(peer, cause, "look at that rank's own log"));
    failures_.report();
  });
}

std::optional<uint64_t> Healing::settle(int peer) {
  std::optional<uint64_t> taken;
  run(peer, [&](Link& link, Case&) {
    if (!link.repair().possible() || !link.healing()) return;
    links_.guarded(peer, [](Link& it) {
      it.repair().drain();
      return true;
    });
    failures_.report();
    if (!link.usable()) return;  // the goodbye was read, or the bytes were damaged
    links_.interrupt(peer);
    taken = link.repair().frames_taken();
  });
  return taken;
}

void Healing::resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) {
  run(peer, [&](Link& link, Case& it) {
    role_.assert_held();
    // the peer sees the end of this channel
    if (!link.repair().possible() || !link.healing() || link.connected()) return;
    const int64_t took_ms = link.broken_for_ms();
    const auto before = std::exchange(it.error, std::nullopt);  // it may break again at once
    if (links_.resume(peer, std::move(channel), taken)) return note(peer, took_ms);
    it.error = before;
    end(peer, "it lacks frames that its host, or a proxy on the way, had acknowledged");
  });
}

void Healing::add_stream(int peer, Fd socket) {
  run(peer, [&](Link& link, Case&) { link.repair().add_stream(std::move(socket)); });
}

void Healing::give_up(int peer, const std::string& why) {
  run(peer, [&](Link&, Case&) {
    role_.assert_held();
    end(peer, why);
  });
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

void Healing::end(int peer, const std::string& why) {
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

void Healing::wait_until_whole(Deadline deadline) {
  for (bool heals = true; heals && !deadline.expired();) {
    role_.run([&] {
      const auto links = links_.all();
      heals = std::any_of(links.begin(), links.end(),
                          [](const auto& link) { return link && link->usable() && link->healing(); });
    });
    if (heals) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

uint64_t Healing::healed() {
  uint64_t count = 0;
  role_.run([&] {
    role_.assert_held();
    count = healed_;
  });
  return count;
}

}  // namespace ringdp

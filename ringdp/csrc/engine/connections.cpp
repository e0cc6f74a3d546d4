#include "engine/connections.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace ringdp {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kUnread{400};  // an idle engine looks at its links four times a second
constexpr milliseconds kUnsent{1000};

milliseconds patience_with(Link& link, int64_t heal_ms) {
  if (link.healing()) return milliseconds(heal_ms);
  return link.has_outgoing() || !link.drained() ? kUnsent : link.repair().possible() ? kUnread : milliseconds(0);
}

}  // namespace

void say_goodbye(PeerLinks& links, const std::string& reason) {
  for (auto& link : links.all())
    if (link) link->send_bye(reason);  // a rank without a connection sees that nothing listens here
  links.send_all();
}

bool parted(const PeerLinks& links, Clock::time_point since, int64_t heal_ms) {
  const auto waited = Clock::now() - since;
  const auto all = links.all();
  return std::all_of(all.begin(), all.end(), [&](auto& link) {
    if (!link || !link->usable() || (!link->connected() && !link->healing())) return true;
    return waited >= patience_with(*link, heal_ms);
  });
}

void end_connections(PeerLinks& links, Deadline deadline) {
  // A peer that does not read must not keep this rank from leaving.
  while (links.anything_outgoing() && !deadline.expired())
    if (!links.send_all()) std::this_thread::sleep_for(milliseconds(1));
  for (auto& link : links.all()) {
    if (!link || !link->connected()) continue;
    links.guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kEagerWindowBytes); });
    if (link->connected()) link->channel().close_send();
  }
  const auto all = links.all();
  auto drained = [](auto& link) { return !link || link->drained(); };
  while (!std::all_of(all.begin(), all.end(), drained) && !deadline.expired())
    std::this_thread::sleep_for(milliseconds(1));
}

bool Connections::closed() const {
  MutexLock lock(role_.mutex());
  return role_.closed();
}

void Connections::connect(int peer, std::unique_ptr<Channel> channel, bool checksums) {
  role_.run([&] {
    const Link& link = *links_[peer];
    // no longer wanted: the peer sees the end of this connection
    if (closed() || link.connected() || !link.usable()) return;
    links_.connect(peer, std::move(channel), checksums);
  });
}

void Connections::cannot_connect(int peer, const Error& error, bool gone) {
  role_.run([&] {
    const Link& link = *links_[peer];
    if (closed() || link.connected() || !link.usable()) return;
    if (link.healing()) return healing_.give_up(peer, error.context().cause);
    failures_.on_unreachable(peer, error, gone);
    failures_.report();
  });
}

bool Connections::hold(int peer) {
  bool held = false;
  role_.run([&] { held = !closed() && healing_.hold(peer); });
  return held;
}

std::optional<uint64_t> Connections::settle(int peer) {
  std::optional<uint64_t> taken;
  role_.run([&] {
    if (!closed()) taken = healing_.settle(peer);
  });
  return taken;
}

void Connections::resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) {
  role_.run([&] {
    if (!closed()) healing_.resume(peer, std::move(channel), taken);
  });
}

void Connections::add_stream(int peer, Fd socket) {
  role_.run([&] {
    if (!closed()) links_[peer]->repair().add_stream(std::move(socket));
  });
}

void Connections::not_healed(int peer, const std::string& why) {
  role_.run([&] {
    if (!closed()) healing_.give_up(peer, why);
  });
}

void Connections::wait_until_whole(Deadline deadline) {
  for (bool heals = true; heals && !deadline.expired();) {
    role_.run([&] { heals = !closed() && healing_.any(); });
    if (heals) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

uint64_t Connections::healed() {
  uint64_t count = 0;
  role_.run([&] { count = healing_.healed(); });
  return count;
}

}  // namespace ringdp

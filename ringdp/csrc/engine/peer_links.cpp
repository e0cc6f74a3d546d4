#include "engine/peer_links.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace ringdp {

namespace {

int bell_of(Channel& channel) { return channel.direct() != nullptr ? channel.direct()->bell_fd() : -1; }

}  // namespace

void ChannelWatch::add(Channel& channel, int peer) {
  writing_[static_cast<std::size_t>(peer)] = 0;
  for (Poller* poller : pollers_) {
    poller->add(channel.poll_fd(), static_cast<uint32_t>(peer));
    if (const int bell = bell_of(channel); bell >= 0) poller->add_bell(bell, static_cast<uint32_t>(peer));
  }
}

void ChannelWatch::remove(Channel& channel) {
  for (Poller* poller : pollers_) {
    poller->remove(channel.poll_fd());
    if (const int bell = bell_of(channel); bell >= 0) poller->remove(bell);
  }
}

void ChannelWatch::follow(std::span<const std::unique_ptr<Link>> links) {
  for (const auto& link : links) {
    if (!link || link->direct() != nullptr || !link->connected() || link->departed()) continue;
    int peer = link->peer().rank;
    if (link->wants_write() == static_cast<bool>(writing_[peer])) continue;
    writing_[peer] = link->wants_write();
    pollers_[0]->want_write(link->channel().poll_fd(), static_cast<uint32_t>(peer), link->wants_write());
  }
}

namespace {

constexpr std::size_t kReceiveBudgetBytes = 1024 * 1024;
constexpr int kPolledLinks = 8;  // up to so many links are read directly, which is faster than the poller
constexpr auto kHostPeriod = std::chrono::milliseconds(500);
// without an answer of a host: then a new connection is tried, which may work sooner
constexpr int64_t kSilentMs = 1000;
constexpr int64_t kHealGraceMs = 2000;  // for the connecting thread to report that it failed

}  // namespace

PeerLinks::PeerLinks(int rank, std::vector<MeshPeer> peers, const EngineOptions& options, const DriverRole& role,
                     std::array<Poller*, 2> pollers, const LinkEvents& link_events, Events events)
    : peers_(rank, peers),
      role_(role),
      watch_(pollers, peers.size()),
      wrap_channel_(options.wrap_channel),
      events_(std::move(events)),
      heal_ms_(options.heal_connection ? options.heal_ms : 0),
      links_(peers.size()),
      first_((static_cast<std::size_t>(rank) + 1) % peers.size()) {
  if (options.rate_bytes_per_s > 0) limiter_.emplace(options.rate_bytes_per_s);
  for (MeshPeer& peer : peers) {
    const int place = peer.info.rank;
    if (place == rank) continue;
    std::unique_ptr<Channel> channel = peer.channel ? adopt(std::move(peer.channel), place) : nullptr;
    links_[place] = std::make_unique<Link>(peers_.self(), peer.info, std::move(channel), link_events, peer.checksums,
                                           options.segment_bytes, heal_ms_ > 0);
    links_[place]->watch_host(std::max(options.host_silence_ms, heal_ms_));
  }
}

std::unique_ptr<Channel> PeerLinks::adopt(std::unique_ptr<Channel> channel, int peer) {
  watch_.add(*channel, peer);
  if (limiter_ && channel->direct() == nullptr)
    channel = std::make_unique<LimitedChannel>(std::move(channel), *limiter_);
  if (wrap_channel_) channel = wrap_channel_(std::move(channel), peer);
  some_streams_ |= channel->direct() == nullptr;
  return channel;
}

void PeerLinks::connect(int peer, std::unique_ptr<Channel> channel, bool checksums) {
  role_.assert_held();
  links_[peer]->connect(adopt(std::move(channel), peer), checksums);
  send_to(peer);
}

void PeerLinks::drop(int peer) {
  Link& link = *(*this)[peer];
  if (link.connected()) watch_.remove(link.channel());
  link.close();
}

void PeerLinks::interrupt(int peer) {
  Link& link = *(*this)[peer];
  if (link.connected()) watch_.remove(link.channel());
  link.repair().interrupt();
}

bool PeerLinks::resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) {
  role_.assert_held();
  if (!links_[static_cast<std::size_t>(peer)]->repair().resume(adopt(std::move(channel), peer), taken)) return false;
  send_to(peer);
  return true;
}

void PeerLinks::discard_group(uint64_t group, const std::vector<int>& members) {
  for (int member : members)
    if (Link* link = (*this)[member]) link->discard_group(group);
}

bool PeerLinks::guarded(int peer, const std::function<bool(Link&)>& action) {
  Link& link = *(*this)[peer];
  if (link.broken()) return false;
  try {
    bool moved = action(link);
    if (link.departed() && link.connected()) watch_.remove(link.channel());
    return moved;
  } catch (const ConnectionBroken& error) {
    if (!link.repair().possible()) {
      events_.lost(peer, error);
      return true;
    }
    error.still_read() ? link.repair().stop_sending() : interrupt(peer);
    events_.broken(peer, error);
    return true;
  } catch (const Error& error) {
    events_.lost(peer, error);
    return true;
  }
}

bool PeerLinks::pump() {
  role_.assert_held();
  bool moved = false;
  bool few = peers_.world() <= kPolledLinks;
  const std::size_t first = first_;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    const std::size_t place = first + i < links_.size() ? first + i : first + i - links_.size();
    auto& link = links_[place];
    if (!link || link->broken() || link->departed()) continue;
    bool ask = few || link->direct() != nullptr;
    if (link->has_outgoing() && (ask || !link->wants_write())) {
      bool sent = send_to(link->peer().rank);
      if (sent && limiter_) first_ = (place + 1) % links_.size();
      moved |= sent;
    }
    if (ask && link->expects() && !link->broken())
      moved |= guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kReceiveBudgetBytes); });
  }
  if (few || !some_streams_) return moved;
  watch_.follow(links_);
  return moved | poll();
}

bool PeerLinks::poll() { return serve(watch_.look()); }

bool PeerLinks::serve(const std::vector<Poller::Event>& events) {
  bool moved = false;
  for (const Poller::Event& event : events) {
    int peer = static_cast<int>(event.token);
    if (event.readable)
      moved |= guarded(peer, [](Link& it) {
        if (!it.connected()) return false;  // that channel was destroyed
        if (it.direct() != nullptr) it.direct()->noticed();
        return it.pump_receive(kReceiveBudgetBytes);
      });
    const Link& link = *(*this)[peer];
    if (event.writable || (event.readable && link.usable() && link.wants_write())) moved |= send_to(peer);
  }
  return moved;
}

void PeerLinks::receive_all() {
  for (auto& link : all())
    if (link && !link->broken() && !link->departed())
      guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kReceiveBudgetBytes); });
}

bool PeerLinks::send_all() {
  bool moved = false;
  for (auto& link : all())
    if (link && link->has_outgoing()) moved |= send_to(link->peer().rank);
  return moved;
}

bool PeerLinks::anything_outgoing() const {
  const auto links = all();
  return std::any_of(links.begin(), links.end(), [](const auto& link) { return link && link->has_outgoing(); });
}

// Calls before_sleep of direct channels. Reads the bytes in them, because otherwise the driver looks only at channels
// from which an operation expects bytes.
bool PeerLinks::before_sleep() {
  watch_.follow(links_);
  asleep_ = true;
  bool quiet = true;
  for (auto& link : all()) {
    if (!link || link->direct() == nullptr || link->broken() || link->departed()) continue;
    if (link->direct()->before_sleep(link->wants_write())) continue;
    quiet = false;
    guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kReceiveBudgetBytes); });
  }
  return quiet;
}

void PeerLinks::after_sleep() {
  if (!std::exchange(asleep_, false)) return;
  for (auto& link : all())
    if (link && link->direct() != nullptr) link->direct()->after_sleep();
}

Clock::time_point PeerLinks::next_send() const {
  const auto links = all();
  const bool held_back =
      limiter_ && std::any_of(links.begin(), links.end(), [](auto& link) { return link && link->held_back(); });
  auto next = held_back ? limiter_->next() : Clock::time_point::max();
  for (const auto& link : links)
    if (link && link->has_outgoing()) next = std::min(next, link->next_bulk());
  return next;
}

bool PeerLinks::check_hosts(Clock::time_point now) {
  role_.assert_held();
  if (now < next_host_check_) return false;
  next_host_check_ = now + kHostPeriod;
  for (auto& link : links_) {
    if (!link || link->broken() || link->departed()) continue;
    const int peer = link->peer().rank;
    guarded(peer, [this](Link& it) {
      it.check_host();
      if (it.broken_for_ms() > heal_ms_ + kHealGraceMs)
        it.fail(ErrorKind::kPeerLost, "the connection broke and was not made again", "look at that rank's own log");
      return false;
    });
    if (link->repair().possible() && link->host_silence_ms() >= kSilentMs) events_.silent(peer);
  }
  return true;
}

void PeerLinks::close() {
  for (auto& link : all())
    if (link) link->close();
}

Link::Traffic PeerLinks::traffic() const {
  Link::Traffic all;
  for (const auto& link : links_) {
    if (!link) continue;
    const Link::Traffic one = link->traffic();
    all.sent += one.sent;
    all.received += one.received;
  }
  return all;
}

uint64_t PeerLinks::bytes_sent_to(int peer) const {
  const auto& link = links_.at(static_cast<std::size_t>(peer));
  return link ? link->traffic().sent : 0;
}

std::map<int, NetworkPath::Carried> carried_by(const PeerLinks& links) {
  std::map<int, NetworkPath::Carried> found;
  for (const auto& link : links.all())
    if (link && link->path() != nullptr && link->usable())
      if (const auto carried = link->path()->carried()) found[link->peer().rank] = *carried;
  return found;
}

std::string slow_paths_text(const PeerLinks& links, const std::vector<int>& peers) {
  std::string out;
  for (int peer : peers) {
    const Link* link = links[peer];
    if (link == nullptr || !link->usable() || link->path() == nullptr) continue;
    if (const std::string text = link->path()->slowed_by(); !text.empty())
      out += "; to rank " + std::to_string(peer) + ": " + text;
  }
  return out;
}

}  // namespace ringdp

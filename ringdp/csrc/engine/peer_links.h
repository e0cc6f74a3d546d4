// PeerLinks: the links to all peers, and their rate limit. It moves bytes on each; an error that a link throws ends
// that link and is reported once. Owned by the Engine. Used by the thread that drives; any thread may read the peers'
// identities and the byte counters.
//
// ChannelWatch: polls the channels to the peers for bytes, bells, and room in full ones. Its tokens are the peers'
// places in the world. Owned by PeerLinks, used by it on the thread that drives the engine.
//
// PeerTable: the identities of the ranks of the world. Owned by PeerLinks, made once and never changed; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "link/link.h"
#include "meet/rendezvous.h"
#include "transport/channel.h"
#include "transport/poller.h"
#include "transport/rate_limit.h"

namespace ringdp {

class PeerTable {
 public:
  PeerTable(int rank, const std::vector<MeshPeer>& peers) : rank_(rank) {
    for (const MeshPeer& peer : peers) infos_.push_back(peer.info);
  }

  int rank() const { return rank_; }  // of this process
  int world() const { return static_cast<int>(infos_.size()); }
  const PeerInfo& info(int rank) const { return infos_[static_cast<std::size_t>(rank)]; }
  const PeerInfo& self() const { return info(rank_); }

 private:
  const int rank_;
  std::vector<PeerInfo> infos_;  // by place in the world
};

class ChannelWatch {
 public:
  // Room is polled for by the first one.
  ChannelWatch(std::array<Poller*, 2> pollers, std::size_t peers) : pollers_(pollers), writing_(peers, 0) {}

  void add(Channel& channel, int peer);
  void remove(Channel& channel);
  // `links` by place in the world: from now on polls exactly the full ones for room to write.
  void follow(std::span<const std::unique_ptr<Link>> links);
  const std::vector<Poller::Event>& look() { return pollers_[0]->wait(0); }  // without sleeping

 private:
  const std::array<Poller*, 2> pollers_;
  std::vector<char> writing_;  // by peer: watched for room to write
};

class PeerLinks final : public FlowCarrier {
 public:
  struct Events {
    // The link to that peer has thrown. `lost` must call `drop`, or leave a damaged link to be read to its end;
    // `broken`: its connection has ended, and can be replaced.
    std::function<void(int peer, const Error& error)> lost;
    std::function<void(int peer, const ConnectionBroken& error)> broken;
    std::function<void(int peer)> silent;  // `check_hosts` has found that its host has not answered for a while
  };

  // Peers without a channel are connected later. `pollers`: see DriverRole.
  PeerLinks(int rank, std::vector<MeshPeer> peers, const EngineOptions& options, const DriverRole& role,
            std::array<Poller*, 2> pollers, const LinkEvents& link_events, Events events);

  const PeerTable& peers() const { return peers_; }

  // By place in the world; null for this rank.
  Link* operator[](int peer) const {
    role_.assert_held();
    return links_[static_cast<std::size_t>(peer)].get();
  }
  std::span<const std::unique_ptr<Link>> all() const {
    role_.assert_held();
    return links_;
  }

  void attach(SendFlow& flow) override { link(flow.peer).attach(flow); }
  void attach(RecvFlow& flow) override { link(flow.peer).attach(flow); }
  void detach(SendFlow& flow) override { link(flow.peer).detach(flow); }
  void detach(RecvFlow& flow) override { link(flow.peer).detach(flow); }
  void widen(RecvFlow& flow) override { link(flow.peer).incoming().widen(flow); }
  void will_change(const SendFlow& flow, std::span<const std::byte> memory) override {
    link(flow.peer).will_change(flow, memory);
  }
  void announce(int peer, const FlowIdentity& identity) override { link(peer).announce(identity); }
  std::string peer_text(int peer) const override { return peers_.info(peer).text(); }

  void connect(int peer, std::unique_ptr<Channel> channel, bool checksums);
  void drop(int peer);       // closes the link for good; a living peer notices that
  void interrupt(int peer);  // closes its channel, if it has one, to replace it
  // Replaces it, for a peer that has received so many frames. False: a frame that it lacks was dropped here.
  bool resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken);
  void discard_group(uint64_t group, const std::vector<int>& members);  // its later frames are dropped

  // Calls `action` with a link that is not broken; its exception ends the link. True if bytes moved, or the link was
  // lost.
  bool guarded(int peer, const std::function<bool(Link&)>& action);

  // These return whether bytes moved.
  bool send_to(int peer) {
    return guarded(peer, [](Link& it) { return it.pump_send(); });
  }
  bool pump();  // queued sends, and links that expect bytes
  bool poll();  // links that the poller reports, without waiting
  bool serve(const std::vector<Poller::Event>& events);
  void receive_all();  // all links, for pings and goodbyes
  bool send_all();
  bool anything_outgoing() const;

  // Around a sleep in the poller. False: a direct channel has bytes, do not sleep. Both may be called again.
  bool before_sleep();
  void after_sleep();
  Clock::time_point next_send() const;  // when the rate limit allows the next send; max(): it delays none

  // Checks at intervals whether the peers' hosts answer. True if it checked, and may have lost a link.
  bool check_hosts(Clock::time_point now);

  void close();

  Link::Traffic traffic() const;  // of all
  uint64_t bytes_sent_to(int peer) const;

 private:
  Link& link(int peer) const { return *links_[static_cast<std::size_t>(peer)]; }
  std::unique_ptr<Channel> adopt(std::unique_ptr<Channel> channel, int peer);  // polled from now on

  const PeerTable peers_;
  const DriverRole& role_;
  ChannelWatch watch_;  // the driver's
  const std::function<std::unique_ptr<Channel>(std::unique_ptr<Channel>, int peer)> wrap_channel_;
  const Events events_;
  const int64_t heal_ms_;
  std::optional<RateLimiter> limiter_;        // of all streams; outlives the links
  std::vector<std::unique_ptr<Link>> links_;  // constant; the links are for the driver, except the byte counters
  // The link that sends first: that of the right neighbour, so that not all ranks send to the same one at once. With a
  // limiter the links take turns.
  std::size_t first_ RINGDP_GUARDED_BY(role_);
  bool some_streams_ = false;  // not all links are direct; the driver's
  bool asleep_ = false;        // between these two; the driver's
  Clock::time_point next_host_check_ RINGDP_GUARDED_BY(role_){};
};

// By place in the world, for peers over TCP. By the driver.
std::map<int, NetworkPath::Carried> carried_by(const PeerLinks& links);

// System settings that make paths to these peers slow; usually empty. By the driver.
std::string slow_paths_text(const PeerLinks& links, const std::vector<int>& peers);

}  // namespace ringdp

// PeerLinks: the links to all peers, and the limit to what they send. It moves what can be moved on each; an error
// that a link throws ends that link and is told once. Owned by the Engine. Used by the thread that drives; any thread
// may ask who a peer is and how many bytes have moved.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/channel_watch.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "engine/peer_table.h"
#include "mesh/link.h"
#include "mesh/rendezvous.h"
#include "transport/poller.h"
#include "transport/rate_limit.h"

namespace ringdp {

class PeerLinks {
 public:
  struct Events {
    // The link to that peer has thrown. `lost` must call `drop`, or leave a damaged link to be read to its end;
    // `broken`: its connection has ended, and can be made again.
    std::function<void(int peer, const Error& error)> lost;
    std::function<void(int peer, const Error& error)> broken;
    std::function<void(int peer)> silent;  // its host has not answered for a while, as `check_hosts` has found
  };

  // Peers without a channel are connected later.
  PeerLinks(int rank, std::vector<MeshPeer> peers, const EngineOptions& options, const DriverRole& role, Poller& poller,
            const LinkEvents& link_events, Events events);

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

  void connect(int peer, std::unique_ptr<Channel> channel, bool checksums);
  void drop(int peer);       // closes the link for good; a peer that is alive after all notices it
  void interrupt(int peer);  // closes its channel, if it has one: another one will take its place
  // That one, to a peer that has taken so many frames. False: one that it lacks is not here any more.
  bool resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken);
  void discard_group(uint64_t group, const std::vector<int>& members);  // what still arrives for it is dropped

  // Does something with a link that is not broken; what it throws ends the link. True if bytes moved, or it was lost.
  bool guarded(int peer, const std::function<bool(Link&)>& action);

  // These move bytes, and answer whether any moved.
  bool send_to(int peer) {
    return guarded(peer, [](Link& it) { return it.pump_send(); });
  }
  bool pump();  // what waits to be sent, and what is expected
  bool poll();  // what the poller reports at once
  bool serve(const std::vector<Poller::Event>& events);
  void receive_all();  // also what nothing expects: questions, goodbyes
  bool send_all();
  bool anything_outgoing() const;

  // Around a sleep in the poller. False: bytes wait in a direct channel, do not sleep.
  bool before_sleep();
  void after_sleep();
  Clock::time_point next_send() const;  // when the limit lets through what it holds back; max(): it holds nothing back

  // Now and then: whether the peers' hosts are there. True if it looked, and may have lost a link.
  bool check_hosts(Clock::time_point now);

  void close();

  Link::Traffic traffic() const;  // of all
  uint64_t bytes_sent_to(int peer) const;

 private:
  std::unique_ptr<Channel> adopt(std::unique_ptr<Channel> channel, int peer);  // polled from now on

  const PeerTable peers_;
  const DriverRole& role_;
  ChannelWatch watch_;  // the driver's
  const std::function<std::unique_ptr<Channel>(std::unique_ptr<Channel>, int peer)> wrap_channel_;
  const Events events_;
  const int64_t heal_ms_;
  std::optional<RateLimiter> limiter_;        // of all streams; outlives the links
  std::vector<std::unique_ptr<Link>> links_;  // made once; their state is the driver's, but for the counters of bytes
  std::size_t first_ RINGDP_GUARDED_BY(role_) = 0;  // with a limiter: whose turn it is
  bool some_streams_ = false;                       // not all links are direct; the driver's
  Clock::time_point next_host_check_ RINGDP_GUARDED_BY(role_){};
};

// By place in the world, of the peers to which the kernel counts what it carries. By the driver.
std::map<int, Channel::Carried> carried_by(const PeerLinks& links);

// Of the paths to these peers that a setting of this system makes slow; mostly empty. By the driver.
std::string slow_paths_text(const PeerLinks& links, const std::vector<int>& peers);

}  // namespace ringdp

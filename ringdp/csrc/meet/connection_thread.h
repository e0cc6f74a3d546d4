// ConnectionThread: makes the connections of a large job that were not made at the rendezvous: those that this rank
// needs, and those that others need with it. It also checks once, a few at a time, whether the lower ranks of other
// hosts can be reached, so that a broken path is known before it is needed. In a job of any size it replaces
// connections that break.
//
// Owned by the Runtime. `want` is for any thread; everything else belongs to its own thread "ringdp-conn" from `start`
// on, which also calls the ConnectionUser. It begins with the listeners, routes and memory plan of the RendezvousRun,
// and does not use the store. A process without that thread (a forked child) must only destroy it.
//
// The error of a peer to which a rank cannot connect; its text is true on every rank. Pure functions, any thread.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/log.h"
#include "link/link.h"
#include "meet/connector.h"
#include "meet/redialler.h"
#include "shared/shared_setup.h"

namespace ringdp {

struct UnreachableText {
  ErrorKind kind = ErrorKind::kHandshake;
  std::string text;
  std::string advice;
};

// `when`: "while the ranks met", of a peer that was lost.
UnreachableText unreachable_text(const PeerInfo& self, const PeerInfo& peer, const Connector::Failure& failure,
                                 const std::string& when);

class ConnectionThread {
 public:
  struct Start {
    int rank = 0;
    Connector connector;
    SharedSetup sharing;
    std::vector<PeerInfo> peers;
    std::vector<char> elsewhere;  // per rank: in another network namespace or on another host
    std::string congestion;       // as of the connections of the start
    bool all_connected = false;   // from the start: only broken connections are replaced
    bool checksums = false;       // of the connections over transports that have them
  };

  explicit ConnectionThread(Start start);
  ~ConnectionThread();
  ConnectionThread(const ConnectionThread&) = delete;
  ConnectionThread& operator=(const ConnectionThread&) = delete;

  // Once. `user` lives until `stop` has returned. `heal_ms`: how long it tries to replace a broken connection; 0: not
  // at all.
  void start(ConnectionUser& user, int64_t heal_ms);
  void want(int peer);                                          // no more than once counts
  void heal(int peer, bool broken);                             // see Redialler
  bool all_connected() const { return state_->all_connected; }  // before `start`: at the rendezvous
  void stop();                                                  // idempotent; `user` is not called after it

 private:
  void run();
  bool step();
  void give_up(const std::string& why);
  bool take_wishes();
  void start_checks(Clock::time_point now);
  void hand_over();
  void look_for_failures();
  void fail(const Connector::Failure& failure);
  Error explain(const Connector::Failure& failure) const;
  Error error_of(int peer, ErrorKind kind, const std::string& message, const std::string& advice) const;

  std::optional<Start> state_;          // until it is stopped
  ConnectionUser* user_ = nullptr;      // from `start` on
  std::optional<Redialler> redialler_;  // of its thread
  std::vector<int> unchecked_;          // lower ranks, the next one last
  Clock::time_point check_after_{};
  Fd wakeup_;  // eventfd(2)
  const unsigned generation_ = fork_generation();
  std::unique_ptr<std::thread> thread_;

  std::mutex mutex_;  // guards the members below
  std::vector<int> wishes_;
  std::vector<std::pair<int, bool>> broken_;  // peer, and whether its connection has broken
  bool stopping_ = false;
};

}  // namespace ringdp

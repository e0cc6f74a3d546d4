// Healing: the engine's side of ConnectionThread: it takes first connections, and decides between healing and losing.
// A link whose connection has broken waits while that thread makes another one and calls the steps here
// (meet/redialler.h); the peer is lost if there is none in time, or at once if its process has ended. Invariant: the
// error of a broken connection is kept until it is replaced or its peer is lost. Owned by the Engine. PeerLinks calls
// it on the thread that drives; what is of a ConnectionUser is for any other thread: it runs while no thread drives,
// and does nothing once the engine is closed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "engine/failure_agreement.h"
#include "engine/peer_links.h"
#include "meet/redialler.h"

namespace ringdp {

class Healing final : public ConnectionUser {
 public:
  Healing(DriverRole& role, PeerLinks& links, FailureAgreement& failures, NoticeBoard& notices,
          const EngineOptions& options);

  // By the driver.
  void on_broken(int peer, const ConnectionBroken& error);
  void on_silent(int peer);

  void connect(int peer, std::unique_ptr<Channel> channel, bool checksums) override;
  void cannot_connect(int peer, const Error& error, bool gone) override;
  bool hold(int peer) override;
  std::optional<uint64_t> settle(int peer) override;
  void resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) override;
  void add_stream(int peer, Fd socket) override;
  void give_up(int peer, const std::string& why) override;
  void notice(LogLevel level, const std::string& line) override { notices_.post(level, line); }

  // Any thread: the peer is lost from now on, whether its connection has broken or not.
  void lose(int peer, const std::string& cause);

  void wait_until_whole(Deadline deadline);  // no connection heals any more
  uint64_t healed();                         // how often one has

 private:
  struct Case {
    std::optional<Error> error;  // why its connection broke; set while it heals
    std::deque<Clock::time_point> healed{};
    // Since when its bytes are tampered with again and again, with hardly any that arrive in between.
    std::optional<Clock::time_point> tampered_since{};
    Clock::time_point tampered_at{};
    uint64_t received = 0;  // bytes, then
    Clock::time_point warned_at{};
  };

  // Runs `step` with the link to that peer while no thread drives, unless the engine is closed.
  void run(int peer, const std::function<void(Link& link, Case& it)>& step);
  Error loss_of(int peer, const std::string& cause, const std::string& advice) const;
  void end(int peer, const std::string& why) RINGDP_REQUIRES(role_);  // one that was to heal
  bool hopeless(Case& it, uint64_t received) const;                   // after bytes were tampered with
  void note(int peer, int64_t took_ms) RINGDP_REQUIRES(role_);

  DriverRole& role_;
  PeerLinks& links_;
  FailureAgreement& failures_;
  NoticeBoard& notices_;
  const EngineOptions& options_;
  std::vector<Case> cases_ RINGDP_GUARDED_BY(role_);  // by peer
  uint64_t healed_ RINGDP_GUARDED_BY(role_) = 0;
};

}  // namespace ringdp

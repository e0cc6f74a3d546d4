// Healing: the engine's side of replacing a broken connection. The link waits while the connecting thread makes
// another connection (meet/redialler.h) and calls the steps here; the peer is lost if there is none in time, or at
// once if its process has ended. Owned by the Engine. Used by the thread that drives: called by PeerLinks and by
// Connections.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "engine/failure_agreement.h"
#include "engine/notices.h"
#include "engine/peer_links.h"

namespace ringdp {

class Healing {
 public:
  Healing(const DriverRole& role, PeerLinks& links, FailureAgreement& failures, NoticeBoard& notices,
          const EngineOptions& options);

  void on_broken(int peer, const Error& error);
  void on_silent(int peer);

  // The steps, see LinkRepair. False or nullopt: there is no connection to that peer that could be replaced.
  bool hold(int peer);
  std::optional<uint64_t> settle(int peer);  // how many frames have come in all from a peer that has called `hold`
  void resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken);
  void give_up(int peer, const std::string& why);  // empty: its process has ended

  bool any() const;         // a connection heals
  uint64_t healed() const;  // how often one has

 private:
  struct Case {
    std::optional<Error> error;  // why its connection broke; set while it heals
    std::deque<Clock::time_point> healed{};
    Clock::time_point warned_at{};
  };

  void note(int peer, int64_t took_ms) RINGDP_REQUIRES(role_);

  const DriverRole& role_;
  PeerLinks& links_;
  FailureAgreement& failures_;
  NoticeBoard& notices_;
  const EngineOptions& options_;
  std::vector<Case> cases_ RINGDP_GUARDED_BY(role_);  // by peer
  uint64_t healed_ RINGDP_GUARDED_BY(role_) = 0;
};

}  // namespace ringdp

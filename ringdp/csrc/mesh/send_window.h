// SendWindow: how many bytes the flows to one peer may send. A flow may send what the receiver has granted, and beyond
// that its first bytes (SendFlow::eager) while the peer's window has room. It keeps the grants for operations that
// have not started here yet. Owned by the LinkSender, used by it on the thread that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "mesh/bulk_rate.h"
#include "mesh/flow.h"
#include "mesh/frame.h"

namespace ringdp {

class SendWindow {
 public:
  // How many bytes beyond flow.sent may be sent now.
  std::size_t allowance(const SendFlow& flow) const;
  bool sendable(const SendFlow& flow) const;
  SendFlow* next_of(const std::deque<SendFlow*>& flows) const;  // the flow to send from next, or null
  // True if a small flow must ask for a grant, because the window is used up. It then waits for the grant, so none
  // comes too late.
  bool must_request(const SendFlow& flow) const;

  void sent_eagerly(std::size_t bytes) { eager_sent_ += static_cast<uint32_t>(bytes); }
  void credited(uint32_t credit) { eager_credited_ = credit; }
  // False: too many grants wait for their operations.
  bool keep_grant(const FrameHeader& header);
  void take_grant(SendFlow& flow);  // grants that came before the flow was attached
  void discard_group(uint64_t group);
  BulkRate& bulk_rate() { return bulk_rate_; }

 private:
  BulkRate bulk_rate_;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> early_grants_;  // by group and sequence
  uint32_t eager_sent_ = 0;                                         // modulo 2^32, like the credits that answer it
  uint32_t eager_credited_ = 0;
};

}  // namespace ringdp

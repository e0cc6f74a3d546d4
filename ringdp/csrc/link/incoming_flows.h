// IncomingFlows: the flows that a Link receives, and the frames without a flow. A frame that comes before this rank
// has started its operation is kept, and compared when the operation starts (check_early_frames). Every frame's
// fingerprint is compared with this rank's own operation, so that a disagreement fails the group on all ranks instead
// of mixing two operations' bytes. Grants what the flows can take. Owned by the Link, used by it and by its
// LinkReceiver, on the thread that drives the engine.
//
// EarlyFrames: frames that a peer has sent for operations that have not started here, with at most the eager window of
// payload, and its requests for grants. Owned by a LinkReceiver; used by the thread that drives the engine.
//
// LinkEvents: a Link's calls to its owner, on the thread that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/link_sender.h"

namespace ringdp {

// Whether this rank has started an operation, and its description; null if the operation ended long ago.
struct StartedOperation {
  bool started = false;
  const FlowIdentity* identity = nullptr;
};

struct LinkEvents {
  std::function<void(int peer, uint64_t group, const AbortNotice&)> aborted;
  std::function<void(Disagreement)> mismatched;                       // the payload is dropped, the group must fail
  std::function<void(int peer, const std::string& reason)> departed;  // the peer said goodbye
  std::function<void(int peer, uint64_t group, uint64_t sequence, bool with_stacks)> asked;
  std::function<void(int peer, uint64_t group, uint64_t sequence, PeerState)> answered;
  std::function<void(int peer, uint64_t group, uint64_t sequence, std::string stacks)> on_stacks = {};
  std::function<StartedOperation(uint64_t group, uint64_t sequence)> started;
  std::function<void(int peer)> wanted = {};  // the link needs a connection
};

inline constexpr std::size_t kMaxEarlyOperations = 65536;  // how many operations a peer may be ahead

class EarlyFrames {
 public:
  struct Frame {
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  struct Kept {  // of one operation
    bool requested = false;
    std::vector<Frame> frames;
  };

  bool has(uint64_t group, uint64_t sequence) const { return kept_.contains({group, sequence}); }
  bool fits(std::size_t payload) const { return bytes_ + payload <= kEagerWindowBytes && !full(); }

  // False: it is the operation's second frame without payload. Those use up no window, so an operation may have only
  // one: it announces the peer, or is the whole payload.
  bool keep(const FrameHeader& header, std::vector<std::byte> payload);
  bool request(uint64_t group, uint64_t sequence);  // false: there are too many operations

  std::optional<Kept> take(uint64_t group, uint64_t sequence);
  std::vector<FrameHeader> discard(uint64_t group);  // returns the headers of the discarded frames

  // The memory of a payload that was taken is used for the next one that is kept.
  void give_back(std::vector<std::byte> payload) { spare_ = std::move(payload); }
  std::vector<std::byte> spare() { return std::exchange(spare_, {}); }

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // group, sequence

  bool full() const { return kept_.size() >= kMaxEarlyOperations; }

  std::map<Key, Kept> kept_;
  std::size_t bytes_ = 0;  // of payload
  std::vector<std::byte> spare_;
};

class IncomingFlows {
 public:
  IncomingFlows(const Connection& connection, LinkSender& sender, const LinkEvents& events)
      : connection_(connection), sender_(sender), events_(events) {}

  void attach(RecvFlow& flow);
  void widen(RecvFlow& flow);
  void detach(RecvFlow& flow) { std::erase(receiving_, &flow); }
  void check_early_frames(const FlowIdentity& identity);
  bool has_early(uint64_t group, uint64_t sequence) const { return early_.has(group, sequence); }
  void discard_group(uint64_t group);
  bool any() const { return !receiving_.empty(); }

  RecvFlow* find(uint64_t group, uint64_t sequence) const;
  // True if both sides mean the same operation, and the frame is the next piece of the flow.
  bool accept(RecvFlow& flow, const FrameHeader& header);
  // A frame without a flow begins: true if it must be kept, because its operation has not started here yet.
  bool keeps(const FrameHeader& header);
  // That frame is complete. Moves from `payload` if it is kept.
  void keep(const FrameHeader& header, std::vector<std::byte>& payload);

  // `bytes` more of a flow have come; `last`: they complete a frame.
  void advance(RecvFlow& flow, std::size_t bytes, bool last);
  // Copies bytes from a buffer into the flow's memory.
  void hand_over(RecvFlow& flow, uint64_t offset, std::span<const std::byte> bytes) const;
  void consume(const FrameHeader& header);  // eager payload leaves the window

  void on_grant(const FrameHeader& header);
  void on_request(const FrameHeader& header);

 private:
  void grant(RecvFlow& flow);
  void deliver(RecvFlow& flow, const FrameHeader& header, std::span<const std::byte> bytes);
  bool has_started(const FrameHeader& header);  // whether the frame's operation has started; compares it in any case
  void report_mismatch(const FlowIdentity& mine, const FrameHeader& header);

  const Connection& connection_;
  LinkSender& sender_;
  const LinkEvents& events_;
  std::vector<RecvFlow*> receiving_;
  EarlyFrames early_;
  std::set<uint64_t> discarded_;  // groups
};

}  // namespace ringdp

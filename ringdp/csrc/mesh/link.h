// Link: this rank's connection to one peer. Splits flows into frames and puts frames back into flows, compares the two
// sides' descriptions of each operation, and bounds the payload that arrives early (flow control: docs/reference/wire_format.md).
// Owned by the Runtime; used only by the thread that drives the engine. Errors are thrown as Error naming the peer, and
// leave the link unusable.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "mesh/flow.h"
#include "mesh/frame.h"
#include "mesh/frame_check.h"
#include "mesh/peer_state.h"
#include "transport/channel.h"

namespace ringdp {

// Who a rank is, as it said in the store.
struct PeerInfo {
  int rank = -1;
  std::string host;
  int64_t pid = -1;

  std::string text() const;                     // "rank 3 (host node7, pid 4711)"
  void fill_self(ErrorContext& context) const;  // rank, host: of who raises
  void fill_peer(ErrorContext& context) const;  // peer, peer_host, peer_pid: of whom it is about
};

class Link {
 public:
  // Whether this rank has started an operation, and what it was; null when it is long over.
  struct Started {
    bool started = false;
    const FlowIdentity* identity = nullptr;
  };

  // Two ranks disagree about one operation. The peer's name for it is not in its frames, only the name's hash.
  struct Disagreement {
    FlowIdentity mine;
    FrameHeader theirs;
    int peer = -1;

    bool name_unknown() const;  // the peer's operation has a name, and it is not this rank's
    Error explain(const PeerInfo& self, const PeerInfo& peer_info, const std::string& peer_name) const;
  };

  struct Events {
    std::function<void(int peer, uint64_t group, const AbortNotice&)> aborted;
    std::function<void(Disagreement)> mismatched;                       // the payload is dropped, the group must fail
    std::function<void(int peer, const std::string& reason)> departed;  // the peer said goodbye
    std::function<void(int peer, uint64_t group, uint64_t sequence)> asked;
    std::function<void(int peer, uint64_t group, uint64_t sequence, PeerState)> answered;
    std::function<Started(uint64_t group, uint64_t sequence)> started;
    std::function<void(int peer)> wanted = {};  // a connection, by a link that waits for one
  };

  // `checksums`: as on the peer's side; a direct channel has none. Without a channel the link waits for one: it keeps what
  // it has to send, and the first frame asks for the connection.
  Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, Events events, bool checksums = false);

  bool connected() const { return channel_ != nullptr; }
  void connect(std::unique_ptr<Channel> channel, bool checksums);  // once
  void give_up();                                                  // there will be no connection, as after a goodbye

  void limit_segments(std::size_t bytes) { segment_bytes_ = bytes; }  // of the frames sent; at most kSegmentBytes

  void attach(SendFlow& flow);
  void attach(RecvFlow& flow);  // takes in what arrived early; may throw Error(kMismatch)
  void widen(RecvFlow& flow);   // flow.window has grown
  void detach(SendFlow& flow);  // its operation ends early: a frame half sent is finished from a copy
  void detach(RecvFlow& flow);
  // For an operation that only receives from the peer: an empty frame, by which the peer can compare both descriptions.
  void announce(const FlowIdentity& identity);
  void check_early_frames(
      const FlowIdentity& identity);  // it has started: what came early and found no flow is compared
  bool has_early(uint64_t group, uint64_t sequence) const { return early_.contains({group, sequence}); }
  void discard_group(uint64_t group);  // the group failed or is gone: what still arrives for it is dropped

  void send_abort(uint64_t group, const AbortNotice& notice);
  void send_bye(const std::string& reason);
  void send_ping(uint64_t group, uint64_t sequence);
  void send_pong(uint64_t group, uint64_t sequence, const PeerState& state);

  // From now on a peer whose host is gone is an error within about that time, if `check_host` is called now and then.
  void watch_host(int64_t silence_ms);
  void check_host();
  int64_t host_silence_ms() { return connected() ? channel_->host_silence_ms() : 0; }

  // Move what can be moved now; true if anything was. `pump_receive` takes about `budget_bytes` at most.
  bool pump_send();
  bool pump_receive(std::size_t budget_bytes);

  bool wants_write() const { return blocked_ && !channel_->held_back(); }     // the channel is full: poll for room
  bool held_back() const { return has_outgoing() && channel_->held_back(); }  // no use in polling: try later
  bool has_outgoing() const;                                                  // frames or sendable flows wait
  bool expects() const { return !receiving_.empty() || !sending_.empty(); }   // bytes, or grants
  bool departed() const { return departed_; }
  bool broken() const { return broken_; }
  bool damaged() const { return damaged_; }  // bytes did not arrive as they were sent: the rest is discarded unread
  bool usable() const { return !broken_ && !departed_ && !damaged_; }
  bool drained() const { return !connected() || channel_->drained(); }
  void close();  // for good: the link is broken, the descriptor goes, counters stay
  Channel& channel() { return *channel_; }
  bool direct() const { return direct_; }  // see Channel
  const PeerInfo& peer() const { return peer_; }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }          // any thread
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }  // any thread

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // group, sequence
  struct Early {                              // what came before its operation
    bool requested = false;
    std::vector<std::pair<FrameHeader, std::vector<std::byte>>> frames;
  };

  std::size_t allowance(const SendFlow& flow) const;
  bool sendable(const SendFlow& flow) const;
  bool must_request(const SendFlow& flow) const;
  void wish();        // for a connection, where there is none
  bool stage_next();  // fills the outgoing frame; false if there is none
  void append_control(FrameHeader header, const std::string& payload = {});
  void append_control(FrameType type, uint64_t group, uint64_t sequence, uint64_t offset,
                      const std::string& payload = {});
  bool frame_under_way() const { return head_sent_ < head_.size() || payload_sent_ < payload_.size() + padding_; }
  void finish_frame_sent();
  bool take_from_stage();  // false: more bytes are needed
  bool throw_away();       // the bytes that come on a damaged link
  bool pump_direct(std::size_t budget_bytes);
  std::size_t take_direct(std::span<const std::byte> bytes);  // how many it has used up
  std::size_t padding_of(std::size_t payload) const;
  void hand_over(RecvFlow& flow, uint64_t offset, std::span<const std::byte> bytes);
  FrameHeader read_header(const std::byte* head);
  void begin_frame(const FrameHeader& header);
  void begin_data(const FrameHeader& header);
  void finish_payload();
  void apply_grant(const FrameHeader& header);
  void apply_request(const FrameHeader& header);
  bool accept(RecvFlow& flow, const FrameHeader& header);  // false, and reported, if the two sides disagree
  bool no_flow_waits_for(const FrameHeader& header);       // in an operation that has started; compared all the same
  void report_mismatch(const FlowIdentity& mine, const FrameHeader& header);
  void deliver(RecvFlow& flow, const FrameHeader& header, std::span<const std::byte> bytes);
  void keep_early(const FrameHeader& header);
  void consume(const FrameHeader& header);
  void grant(RecvFlow& flow);
  void on_closed(int error_number);  // 0: in good order, but without a goodbye
  RecvFlow* find_receiver(uint64_t group, uint64_t sequence);
  [[noreturn]] void fail(ErrorKind kind, const std::string& what, const std::string& advice,
                         bool unexplained = false) const;
  [[noreturn]] void fail_damaged(const std::string& what);

  PeerInfo self_;
  PeerInfo peer_;
  std::unique_ptr<Channel> channel_;
  Events events_;
  bool direct_ = false;
  FrameCheck check_{false};
  bool wished_ = false;
  bool late_ = false;                                         // was connected after the ranks met
  std::vector<std::pair<FrameHeader, std::string>> waiting_;  // control frames, for the connection that is to come
  bool departed_ = false;
  bool broken_ = false;
  bool damaged_ = false;
  bool said_bye_ = false;   // nothing is sent behind it
  int64_t silence_ms_ = 0;  // for which its host may be silent; 0: any
  std::size_t segment_bytes_ = kSegmentBytes;

  // Sending. `head_` holds control frames and the header of the data frame whose payload is `payload_`.
  std::deque<SendFlow*> sending_;  // oldest operation first
  std::vector<std::byte> control_;
  std::vector<std::byte> head_;
  std::size_t head_sent_ = 0;
  std::span<const std::byte> payload_;
  std::size_t payload_sent_ = 0;  // with its padding
  std::size_t padding_ = 0;       // behind `payload_`, of a direct channel
  SendFlow* payload_flow_ = nullptr;
  std::vector<std::byte> orphan_;  // owns `payload_` when its operation is gone
  bool blocked_ = false;
  uint32_t eager_sent_ = 0;  // modulo 2^32, like the credits that answer it
  uint32_t eager_credited_ = 0;

  // Receiving.
  std::vector<RecvFlow*> receiving_;
  std::map<Key, Early> early_;
  std::map<Key, uint64_t> early_grants_;  // grants for operations of ours that have not started yet
  std::set<uint64_t> discarded_;
  std::size_t early_bytes_ = 0;
  std::vector<std::byte> stage_;  // read-ahead; [stage_begin_, stage_end_) is unread
  std::size_t stage_begin_ = 0;
  std::size_t stage_end_ = 0;
  std::optional<FrameHeader> current_;  // the frame whose payload is arriving
  std::span<std::byte> target_;
  std::size_t target_filled_ = 0;
  RecvFlow* target_flow_ = nullptr;
  std::vector<std::byte> spare_;  // target of payloads without a flow, yet or any more
  bool dropping_ = false;         // the payload goes nowhere
  uint32_t consumed_ = 0;         // eager bytes of the peer used up here
  uint32_t consumed_reported_ = 0;

  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
};

}  // namespace ringdp

// Operation: one collective in flight, as flows to and from the other members of its group. An algorithm derives from
// it, says which flows there are in `prepare`, and moves on in FlowHandler's callbacks; it knows no transport and
// never blocks. Made by any thread, then owned by the Runtime and used only by the thread that drives the engine.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/finite.h"
#include "collective/input_factors.h"
#include "collective/scratch.h"
#include "device/staging.h"
#include "mesh/link.h"

namespace ringdp {

inline constexpr std::size_t kGranuleBytes = 64;  // segments end on it: elements stay whole, loads aligned

// A group as an algorithm sees it. `members[i]` is the place of group rank i in the Runtime's world.
struct GroupView {
  int rank = 0;
  int size = 1;
  std::vector<int> members;
  std::vector<int> hosts;  // hosts[i]: number of member i's host; hosts are numbered as they first appear
  bool far = false;        // a round trip between the job's hosts takes long (tables_for)
  // All-reduces add every element, or the codes of it, in rank order: the bits do not depend on `hosts`, nor on the
  // other elements of the buffer.
  bool rank_order = false;
};

// The n-th send from a member to another under a tag meets the n-th receive of that kind.
struct PointToPoint {
  static constexpr int kAny = -1;

  bool sends = false;
  int from = kAny;  // members of the group
  int to = kAny;
  int32_t tag = 0;
};

struct OperationContext {
  uint64_t group = 0;
  uint64_t sequence = 0;
  std::span<const std::unique_ptr<Link>> links;  // by place in the world; null for this rank
  ScratchPool* scratch = nullptr;
};

class Operation : public FlowHandler {
 public:
  Operation(GroupView group, OperationShape shape, std::string name);
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // A copy within this rank, made when the operation starts: earlier operations of the group may still write `from`.
  void copy_at_start(std::span<std::byte> to, std::span<const std::byte> from);

  // An all-reduce reads its input there, of the same size, and leaves it as it is. False: this one cannot, but
  // `copy_at_start` does.
  virtual bool read_from(std::span<const std::byte> /*input*/) { return false; }

  // An all-reduce reports in `report`, which may be null, which of its elements are not finite.
  void watch(std::shared_ptr<FiniteReport> report) {
    watch_ = FiniteWatch(identity_.shape.dtype, std::move(report));
    watch_.hand_on(staging_.get());
  }
  // Of an all-reduce in place: the ranks' inputs are multiplied before they are reduced.
  void multiply(std::span<std::byte> input, InputFactors factors) {
    input_ = input;
    input_factors_ = std::move(factors);
  }
  // Single-rank case: the buffer is input and result; it is only scanned for non-finite values.
  void look_at_start(std::span<const std::byte> memory) { only_looked_at_ = memory; }

  // Work around the operation that the caller's buffers need, such as copies between strided and flat memory. The
  // driver runs `before` when the operation starts, and `after` when it is complete and not yet reported.
  void wrap(std::function<void()> before, std::function<void()> after);

  // The operation's memory mirrors that of a device, which gives the input and gets the result. Shared with the
  // caller's Work, which waits for the device.
  void stage(std::shared_ptr<Staging> staging);
  const std::shared_ptr<Staging>& staging() const { return staging_; }
  // The flows that are added from now on say there when their bytes move; those without room do not. All three live
  // until the operation is over. `used`, `left_out`: of the records, read by other threads.
  void record_flows_in(std::span<FlowRecord> records, std::atomic<uint32_t>& used, std::atomic<uint32_t>& left_out);
  // Enough of the input has come from the device. Links may not know the operation before that: they keep early frames.
  bool can_start() const;
  bool started() const { return started_; }
  virtual void more_came() {}  // of the input, since it has started

  // Sends `member` an empty frame, so that ranks that disagree about the root detect it even though no payload flows
  // between them.
  void announces_to(int member) { announce_to_.push_back(member); }
  // The same for an operation in which few members exchange bytes: every member sends an empty frame to its two
  // neighbours in the group's order, also where it is complete at once. If any two members disagree about the
  // operation, then somewhere around the ring two neighbours do, and their failure spreads from there.
  void announces_to_neighbours() { announces_to_neighbours_ = true; }

  // Who sends to whom, for operations outside the group's order; null for collectives.
  virtual const PointToPoint* point_to_point() const { return nullptr; }
  virtual void bind(int /*from*/) {}  // a receive from any member has found its sender

  void start(const OperationContext& context);
  void conclude() {
    let_go();
    if (after_) after_();
    if (staging_) staging_->finish();
  }
  bool complete() const;
  // Ends it early: links forget its flows, its memory may be freed.
  void abandon();

  bool touches(std::span<const std::byte> memory) const;
  bool conflicts(const Operation& other) const;  // both use the same memory
  bool needs(int world_rank) const;              // bytes to or from that rank are still missing
  std::string waiting_for() const;               // "rank 2 (host b, pid 7; 0 of 4096 bytes received)"
  // The ranks of the world to or from which bytes are missing; this rank alone while its device has not given all
  // input.
  std::vector<int> missing() const;
  uint64_t progress() const;  // grows with every byte moved
  const FlowIdentity& identity() const { return identity_; }
  FlowIdentity& mutable_identity() { return identity_; }

  void flushed(SendFlow&) override {}

 protected:
  virtual void prepare() = 0;                     // add flows; scratch is there
  virtual bool finished() const { return true; }  // anything to do besides the flows?
  // It can start with a part of its input; only for algorithms that use `there`.
  virtual bool starts_early() const { return false; }
  // It applies `input_factors_` itself; otherwise its own input is multiplied when it starts.
  virtual bool multiplies_as_it_goes() const { return false; }
  // How many bytes of its memory, from the start, have come from the device; all of them where there is none.
  std::size_t there(std::span<const std::byte> memory) const {
    return staging_ ? staging_->there(memory) : memory.size();
  }

  SendFlow& add_send(int member, uint64_t total, uint64_t ready);
  RecvFlow& add_receive(int member, uint64_t total, uint64_t window);
  void widen(RecvFlow& flow, uint64_t window);
  // What a lasting flow may have sent of this memory is going to be overwritten.
  void will_change(std::span<const std::byte> memory);
  void uses(std::span<const std::byte> memory) {
    if (!memory.empty()) memory_.push_back(memory);
  }
  ScratchPool& scratch() { return *context_.scratch; }

  const GroupView group_;
  std::deque<SendFlow> sends_;  // deques: links hold pointers
  std::deque<RecvFlow> receives_;
  FiniteWatch watch_;
  InputFactors input_factors_;

 private:
  void let_go();  // what links still keep of its memory
  std::vector<int> uninformed_neighbours() const;
  FlowRecord* record_of(int peer, bool sends, uint64_t total);  // null where there is no room

  FlowIdentity identity_;
  OperationContext context_;
  std::vector<std::span<const std::byte>> memory_;
  std::vector<std::pair<std::span<std::byte>, std::span<const std::byte>>> copies_;
  std::span<std::byte> input_;  // where it is to be multiplied
  std::span<const std::byte> only_looked_at_;
  std::function<void()> before_;
  std::function<void()> after_;
  std::shared_ptr<Staging> staging_;
  std::vector<int> announce_to_;
  std::span<FlowRecord> records_;
  std::atomic<uint32_t>* records_used_ = nullptr;
  std::atomic<uint32_t>* records_left_out_ = nullptr;
  bool announces_to_neighbours_ = false;
  bool started_ = false;
  bool prepared_ = false;  // stays false where the start has failed: the operation then never completes
};

}  // namespace ringdp

// Operation: one collective in flight, as flows to and from the other members of its group. An algorithm derives from it,
// says which flows there are in `prepare`, and moves on in FlowHandler's callbacks; it knows no transport and never blocks.
// Made by any thread, then owned by the Runtime and used only by the thread that drives the engine.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/finite.h"
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

  // Of an all-reduce: what its elements are is told in `report`, which may be null.
  void watch(std::shared_ptr<FiniteReport> report) {
    watch_ = FiniteWatch(identity_.shape.dtype, std::move(report));
    watch_.hand_on(staging_.get());
  }
  // Nothing is going to happen to this memory: it is input and result, looked at when the operation starts.
  void look_at_start(std::span<const std::byte> memory) { only_looked_at_ = memory; }

  // What the caller's kind of buffers needs around the operation, run by the driver: `before` when it starts, `after` when
  // it is complete and before anybody hears of it. Copies between strided and flat memory, for example.
  void wrap(std::function<void()> before, std::function<void()> after);

  // Its memory mirrors a device's, where the input comes from and the result goes to. Shared with who waits for the device.
  void stage(std::shared_ptr<Staging> staging);
  const std::shared_ptr<Staging>& staging() const { return staging_; }
  // Enough of the input is there. Before that nothing of it may be known to the links: what came early stays with them.
  bool can_start() const;
  bool started() const { return started_; }
  virtual void more_came() {}  // of the input, since it has started

  // This rank sends `member` nothing here: it tells it that it takes part. Otherwise two ranks that believe each in another
  // root could wait for each other, or both send, without a word between them.
  void announces_to(int member) { announce_to_.push_back(member); }

  // Who sends to whom, for operations outside the group's order; null for collectives.
  virtual const PointToPoint* point_to_point() const { return nullptr; }
  virtual void bind(int /*from*/) {}  // a receive from anybody has found its sender

  void start(const OperationContext& context);
  void conclude() {
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
  // Ranks of the world bytes to or from which are missing; this rank alone while its own device owes it input.
  std::vector<int> missing() const;
  uint64_t progress() const;  // grows with every byte moved
  const FlowIdentity& identity() const { return identity_; }
  FlowIdentity& mutable_identity() { return identity_; }

  void flushed(SendFlow&) override {}

 protected:
  virtual void prepare() = 0;                     // add flows; scratch is there
  virtual bool finished() const { return true; }  // anything to do besides the flows?
  // As much of its input is there as it needs to start; only for those that look at `there`.
  virtual bool starts_early() const { return false; }
  // How many bytes of its memory, from the start, have come from the device; all of them where there is none.
  std::size_t there(std::span<const std::byte> memory) const {
    return staging_ ? staging_->there(memory) : memory.size();
  }

  SendFlow& add_send(int member, uint64_t total, uint64_t ready);
  RecvFlow& add_receive(int member, uint64_t total, uint64_t window);
  void widen(RecvFlow& flow, uint64_t window);
  void uses(std::span<const std::byte> memory) {
    if (!memory.empty()) memory_.push_back(memory);
  }
  ScratchPool& scratch() { return *context_.scratch; }

  const GroupView group_;
  std::deque<SendFlow> sends_;  // deques: links hold pointers
  std::deque<RecvFlow> receives_;
  FiniteWatch watch_;

 private:
  FlowIdentity identity_;
  OperationContext context_;
  std::vector<std::span<const std::byte>> memory_;
  std::vector<std::pair<std::span<std::byte>, std::span<const std::byte>>> copies_;
  std::span<const std::byte> only_looked_at_;
  std::function<void()> before_;
  std::function<void()> after_;
  std::shared_ptr<Staging> staging_;
  std::vector<int> announce_to_;
  bool started_ = false;
  bool prepared_ = false;  // false for good if what the start needs has failed: then it never completes
};

}  // namespace ringdp

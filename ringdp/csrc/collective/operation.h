// Operation: one collective in flight, as flows to and from the other members of its group. An algorithm derives from
// it, adds its flows in `prepare`, and advances in FlowHandler's callbacks; it does not know the transport and never
// blocks. Made by any thread, then owned by the Runtime and used only by the thread that drives the engine.
//
// InputFactors: the factors, one for each rank and known to all, by which the ranks' inputs of an all-reduce are
// multiplied before they are added. A ring multiplies both operands of its sums, which saves a pass over the memory;
// other algorithms multiply their own input when they start. Owned by the operation, used by the driving thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "collective/finite.h"
#include "collective/owner_weights.h"
#include "collective/scratch.h"
#include "device/staging.h"
#include "kernels/kernels.h"
#include "link/flow.h"

namespace ringdp {

class InputFactors {
 public:
  InputFactors() = default;
  // `of_members`: by group rank; empty: no multiplication. The factors are rounded to the tensor's type, float32 or
  // float64. Throws Error(kValue) for other types, and if their number is not `size`.
  InputFactors(DType dtype, std::vector<double> of_members, int rank, int size);

  bool on() const { return !of_members_.empty(); }
  double of(int member) const { return of_members_[static_cast<std::size_t>(member)]; }
  void multiply_own(std::span<std::byte> input) const;
  // The mean of two operands, of which each is a member's input times its factor, or (`member` -1) a sum already.
  void combine(void* to, const void* a, int member_a, const void* b, int member_b, std::size_t divisor,
               std::size_t count) const;

 private:
  std::vector<double> of_members_;
  int rank_ = 0;
  std::size_t element_bytes_ = 1;
  Multiply multiply_ = nullptr;
  Weigh weigh_ = nullptr;
};

// segments are multiples of it, so that no element is cut and loads are aligned
inline constexpr std::size_t kGranuleBytes = 64;

// A group, for algorithms. `members[i]` is the place of group rank i in the Runtime's world.
struct GroupView {
  int rank = 0;
  int size = 1;
  std::vector<int> members;
  std::vector<int> hosts;  // hosts[i]: number of member i's host; hosts are numbered as they first appear
  bool far = false;        // a round trip between the job's hosts takes long (tables_for)
  Weights weights;         // [host]: of what its ranks own; empty: equal (owner_weights)
  // All-reduces add every element, or the codes of it, in rank order: the bits do not depend on `hosts`, nor on the
  // other elements of the buffer.
  bool rank_order = false;
};

// The n-th send from a member to another with a tag matches the n-th receive of that kind.
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
  FlowCarrier* carrier = nullptr;
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

  // Makes an all-reduce read its input there, of the same size, without changing it. False: this algorithm cannot; use
  // `copy_at_start`.
  virtual bool read_from(std::span<const std::byte> /*input*/) { return false; }

  // Makes an all-reduce report its elements that are not finite in `report`, which may be null.
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

  // Work for the caller's buffers, such as copies between strided and flat memory. The driver runs `before` when the
  // operation starts, and `after` when it is complete, before it is reported.
  void wrap(std::function<void()> before, std::function<void()> after);

  // The operation's memory mirrors that of a device, which has the input and receives the result. Shared with the
  // caller's Work, which waits for the device.
  void stage(std::shared_ptr<Staging> staging);
  const std::shared_ptr<Staging>& staging() const { return staging_; }
  // Flows that are added from now on record there when their bytes move; those without room do not. All three must
  // exist until the operation is over. `used`, `left_out`: numbers of records, read by other threads.
  void record_flows_in(std::span<FlowRecord> records, std::atomic<uint32_t>& used, std::atomic<uint32_t>& left_out);
  // Enough of the input has come from the device to start. Before that links must not have the operation's flows: they
  // keep early frames.
  bool can_start() const;
  bool started() const { return started_; }
  virtual void more_came() {}  // more input has come since the start

  // Sends `member` an empty frame, so that ranks that disagree about the root detect it even though no payload flows
  // between them.
  void announces_to(int member) { announce_to_.push_back(member); }
  // The same for an operation in which few members exchange bytes: every member sends an empty frame to its two
  // neighbours in the group's order, even if it is complete at once. If any two members disagree about the operation,
  // two neighbours in the ring do, and their failure spreads from there.
  void announces_to_neighbours() { announces_to_neighbours_ = true; }

  // Sender and receiver, for operations outside the group's order; null for collectives.
  virtual const PointToPoint* point_to_point() const { return nullptr; }
  virtual void bind(int /*from*/) {}  // a receive from any member has found its sender

  void start(const OperationContext& context);
  void conclude() {
    let_go();
    if (after_) after_();
    if (staging_) staging_->finish();
  }
  bool complete() const;
  // Ends it early: links drop its flows, and its memory may be freed.
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
  virtual void prepare() = 0;                     // adds the flows; scratch memory is available
  virtual bool finished() const { return true; }  // false: there is work besides the flows
  // Whether it can start with a part of its input; only for algorithms that use `there`.
  virtual bool starts_early() const { return false; }
  // Whether it applies `input_factors_` itself; otherwise its own input is multiplied when it starts.
  virtual bool multiplies_as_it_goes() const { return false; }
  // How many bytes of its memory, from the start, have come from the device; all without a device.
  std::size_t there(std::span<const std::byte> memory) const {
    return staging_ ? staging_->there(memory) : memory.size();
  }

  SendFlow& add_send(int member, uint64_t total, uint64_t ready);
  RecvFlow& add_receive(int member, uint64_t total, uint64_t window);
  void widen(RecvFlow& flow, uint64_t window);
  // This memory, from which a lasting flow may have sent, will be overwritten.
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
  void let_go();  // makes links copy what they keep of its memory
  std::vector<int> uninformed_neighbours() const;
  FlowRecord* record_of(int peer, bool sends, uint64_t total);  // null where there is no room

  FlowIdentity identity_;
  OperationContext context_;
  std::vector<std::span<const std::byte>> memory_;
  std::vector<std::pair<std::span<std::byte>, std::span<const std::byte>>> copies_;
  std::span<std::byte> input_;  // to be multiplied
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
  bool prepared_ = false;  // false if the start has failed: the operation then never completes
};

}  // namespace ringdp

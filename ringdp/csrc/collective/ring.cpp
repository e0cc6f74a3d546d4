#include "collective/ring.h"

#include <algorithm>

#include "base/stream_copy.h"
#include "collective/all_reduce.h"
#include "collective/scattered.h"

namespace ringdp {
namespace {

constexpr std::size_t kPieceBytes = 16 * 1024;
constexpr uint64_t kLongBytes = 4 << 20;  // its results have left the caches before they are read

}  // namespace

Ring::Ring(GroupView group, OperationShape shape, std::string name,
           std::vector<std::vector<std::span<std::byte>>> slabs, bool reduce)
    : Operation(std::move(group), shape, std::move(name)),
      slabs_(std::move(slabs)),
      reduce_steps_(reduce ? group_.size - 1 : 0),
      steps_(reduce_steps_ + group_.size - 1),
      element_bytes_(dtype_size(shape.dtype)) {
  if (reduce) kernels_ = &reduce_kernels(shape.dtype, shape.op);
  for (const auto& slab : slabs_)
    for (auto block : slab) uses(block);
  lay_out();
}

std::span<std::byte> Ring::out_block(const Leg& leg) const {
  int n = group_.size;
  return slabs_[static_cast<std::size_t>(leg.slab)][static_cast<std::size_t>((group_.rank + 2 * n - leg.step) % n)];
}

std::span<std::byte> Ring::in_block(const Leg& leg) const {
  int n = group_.size;
  return slabs_[static_cast<std::size_t>(leg.slab)][static_cast<std::size_t>((group_.rank + 2 * n - 1 - leg.step) % n)];
}

// A leg is one block of one slab in one step. Both streams of a rank, to the right and from the left, carry the legs
// in the same order, so the offset of a byte in a stream tells its slab and step. A leg can be sent once the incoming
// leg of the same block has arrived (`after`), and slab s is one step behind slab s-1, so that every rank has a block
// to send while it receives another one.
void Ring::lay_out() {
  int slabs = static_cast<int>(slabs_.size());
  std::vector<std::size_t> last(slabs_.size());
  for (int turn = 0; turn < slabs + steps_ - 1; ++turn) {
    for (int step = std::max(0, turn - slabs + 1); step < steps_ && step <= turn; ++step) {
      auto slab = static_cast<std::size_t>(turn - step);
      Leg leg{turn - step, step, step == 0 ? legs_.size() : last[slab], out_total_, in_total_};
      out_total_ += out_block(leg).size();
      in_total_ += in_block(leg).size();
      last[slab] = legs_.size();
      legs_.push_back(leg);
    }
  }
}

bool Ring::read_from(std::span<const std::byte> input) {
  input_ = input.data() - slabs_.front().front().data();
  uses(input);
  return true;
}

void Ring::prepare() {
  if (reduce_steps_ > 0) segment_ = scratch().take(kSegmentBytes);
  int right = (group_.rank + 1) % group_.size, left = (group_.rank + group_.size - 1) % group_.size;
  add_receive(left, in_total_, window());
  SendFlow& send = add_send(right, out_total_, 0);
  send.lasting = true;  // later sums overwrite partial ones
  make_ready(send, 0);
}

// A small buffer is sent without a grant: its operand must be there when it arrives.
bool Ring::starts_early() const { return window() >= std::min<uint64_t>(in_total_, kSmallFlowBytes); }

uint64_t Ring::window() const {
  for (; window_leg_ < legs_.size(); ++window_leg_) {
    const Leg& leg = legs_[window_leg_];
    if (leg.step >= reduce_steps_) continue;
    const auto own = in_block(leg);
    if (const std::size_t here = there(own); here < own.size()) return leg.in_begin + here;
  }
  return in_total_;
}

void Ring::more_came() {
  widen(receives_.front(), window());
  make_ready(sends_.front(), receives_.front().received);
}

// How many bytes of the stream to the right can be sent when `received` bytes have come from the left.
void Ring::make_ready(SendFlow& send, uint64_t received) {
  for (; ready_leg_ < legs_.size(); ++ready_leg_) {
    const Leg& leg = legs_[ready_leg_];
    uint64_t size = out_block(leg).size(), here = there(out_block(leg));
    if (leg.step > 0) {
      uint64_t begin = legs_[leg.after].in_begin;
      here = received > begin ? std::min(size, received - begin) : 0;
    }
    send.ready = leg.out_begin + here;
    if (here < size) return;
  }
}

std::span<const std::byte> Ring::outgoing(SendFlow&, uint64_t offset, std::size_t max) {
  while (offset >= legs_[out_leg_].out_begin + out_block(legs_[out_leg_]).size()) ++out_leg_;
  const Leg& leg = legs_[out_leg_];
  std::span<std::byte> next = out_block(leg).subspan(offset - leg.out_begin);
  if (next.size() > max) next = next.first(max - max % kGranuleBytes);
  if (leg.step == 0) {
    next = {next.data() + input_, next.size()};
    watch_.own(next);
  }
  return next;
}

const Ring::Leg& Ring::leg_in(uint64_t offset) {
  while (offset >= legs_[in_leg_].in_begin + in_block(legs_[in_leg_]).size()) ++in_leg_;
  return legs_[in_leg_];
}

std::span<std::byte> Ring::incoming(RecvFlow&, uint64_t offset, std::size_t length) {
  const Leg& leg = leg_in(offset);
  std::span<std::byte> rest = in_block(leg).subspan(offset - leg.in_begin);
  if (length > rest.size()) return {};
  if (leg.step < reduce_steps_) return {segment_.get(), length};
  return rest.first(length);
}

void Ring::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  if (!data.empty()) {
    const Leg& leg = legs_[in_leg_];  // `incoming` has just set it
    const std::size_t at = offset - leg.in_begin;
    if (leg.step < reduce_steps_)
      add(leg, at, data);
    else
      watch_.result(in_block(leg), at, at + data.size());
  }
  make_ready(sends_.front(), flow.received);
}

// Operands of sums are added without a copy.
bool Ring::take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
  const Leg& leg = leg_in(offset);
  if (leg.step >= reduce_steps_)
    return ends_past_caches(leg) ? put(flow, offset, data, stream_copy) : Operation::take(flow, offset, data);
  const std::size_t at = offset - leg.in_begin;
  if (at + data.size() > in_block(leg).size()) return false;
  add(leg, at, data);
  make_ready(sends_.front(), flow.received);
  return true;
}

// A result that this rank does not forward, in memory that it has not read: storing it through the caches would fetch
// that memory first. An elastic step of 92 MB, 2 ranks: 5.6 % more than one in place that way, 3.7 % past the caches.
bool Ring::ends_past_caches(const Leg& leg) const {
  return input_ != 0 && leg.step == steps_ - 1 && in_total_ >= kLongBytes;
}

// A piece at a time, which stays in the first-level cache.
void Ring::add(const Leg& leg, std::size_t at, std::span<const std::byte> data) {
  const std::span<std::byte> block = in_block(leg);
  const bool last = leg.step == reduce_steps_ - 1;
  for (std::size_t done = 0; done < data.size(); done += kPieceBytes) {
    const std::span<const std::byte> piece = data.subspan(done, std::min(kPieceBytes, data.size() - done));
    std::byte* own = block.data() + at + done;
    watch_.own({own + input_, piece.size()});
    combine(leg, own, piece.data(), piece.size() / element_bytes_);
    if (last) watch_.result(block, at + done, at + done + piece.size());
  }
}

// own = data + this rank's input, and in the last step of an average their mean.
void Ring::combine(const Leg& leg, std::byte* own, const std::byte* data, std::size_t count) const {
  const bool divides = leg.step == reduce_steps_ - 1 && identity().shape.op == ReduceOp::kAvg;
  const auto divisor = static_cast<std::size_t>(divides ? group_.size : 1);
  if (input_factors_.on() && multiplies_as_it_goes()) {
    const int left = (group_.rank + group_.size - 1) % group_.size;
    return input_factors_.combine(own, data, leg.step == 0 ? left : -1, own, group_.rank, divisor, count);
  }
  if (divides && kernels_->mean != nullptr) return kernels_->mean(own, data, own + input_, divisor, count);
  kernels_->combine(own, data, own + input_, count);
  if (divides && kernels_->divide != nullptr) kernels_->divide(own, divisor, count);
}

// A factor passes through sums, not through a maximum.
bool Ring::multiplies_as_it_goes() const {
  const ReduceOp op = identity().shape.op;
  return op == ReduceOp::kSum || op == ReduceOp::kAvg;
}

namespace {

constexpr std::size_t kRingBlockBytes = 256 * 1024;  // a few of them fit into a core's cache

// The length of the ring's blocks; 0: not limited. Short ones are forwarded from the cache. Between two ranks, over
// loopback, 100 MiB: 36 ms, 42 with long ones. Inside a host, through shared memory, 4 ranks on 2 cores, 25 MiB: 8.0,
// 8.5, 9.0 ms with 64, 128, 256 KiB, 10.3 with long ones; 8 ranks: 25.1, 25.7, 23.0 and 24.1. Over TCP more than two
// ranks on few cores work better with long ones, as each can go on while others sleep (4 ranks on 2 cores, 25 MiB: 31
// ms, 38 with short ones).
std::size_t ring_block_bytes(const GroupView& group) {
  if (group.size == 2) return kRingBlockBytes;
  if (layout_of(group.hosts) != Layout::kOneHost) return 0;
  return group.size <= 4 ? kRingBlockBytes / 4 : kRingBlockBytes;
}

// The ring's slabs, of a block for each rank.
std::vector<std::vector<std::span<std::byte>>> slabs_of(std::span<std::byte> memory, const GroupView& group,
                                                        DType dtype) {
  std::size_t block = ring_block_bytes(group);
  std::size_t slab = block > 0 ? block * static_cast<std::size_t>(group.size) : std::max<std::size_t>(memory.size(), 1);
  std::vector<std::vector<std::span<std::byte>>> out;
  for (std::size_t begin = 0; begin == 0 || begin < memory.size(); begin += slab)
    out.push_back(split(memory.subspan(begin, std::min(slab, memory.size() - begin)), group.size, dtype));
  return out;
}

}  // namespace

const AllReduceAlgorithm kRingAllReduce{Algorithm::kRing, [](const AllReduceRequest&) { return true; },
                                        [](const GroupView& group, const OperationShape& shape, std::string name,
                                           std::span<std::byte> memory) -> std::unique_ptr<Operation> {
                                          return std::make_unique<Ring>(group, shape, std::move(name),
                                                                        slabs_of(memory, group, shape.dtype), true);
                                        }};

}  // namespace ringdp

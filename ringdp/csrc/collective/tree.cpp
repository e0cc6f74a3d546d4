#include "collective/tree.h"

#include <algorithm>

#include "collective/all_reduce.h"

namespace ringdp {
namespace {

constexpr std::size_t kBlockBytes = 128 * 1024;  // of a stream up: a child is at most two of them ahead
constexpr std::size_t kPieceBytes = 16 * 1024;   // what is added at a time: stays in the first-level cache

}  // namespace

Tree::Tree(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory)
    : Operation(std::move(group), shape, std::move(name)),
      memory_(memory),
      up_(shape.what != Collective::kBroadcast),
      down_(shape.what != Collective::kReduce),
      element_bytes_(dtype_size(shape.dtype)) {
  if (up_) {
    kernels_ = &reduce_kernels(shape.dtype, shape.op);
    if (kernels_->accumulate != nullptr) wide_ = &reduce_kernels(DType::kFloat32, shape.op);
    if (shape.op == ReduceOp::kAvg) divisor_ = static_cast<std::size_t>(group_.size);
  }
  uses(memory);
  lay_out(std::max(0, shape.root));
  announces_to_neighbours();
}

Tree::Tree(GroupView group, OperationShape shape, std::string name)
    : Operation(std::move(group), shape, std::move(name)),
      memory_(&token_, 1),
      up_(true),
      down_(true),
      element_bytes_(1),
      kernels_(&reduce_kernels(DType::kUint8, ReduceOp::kBor)) {
  lay_out(0);
  announces_to_neighbours();
}

void Tree::lay_out(int root) {
  const int n = group_.size, place = (group_.rank + n - root) % n;
  auto member_at = [&](int at) { return (at + root) % n; };
  block_bytes_ = wide_ != nullptr ? kBlockBytes / 2 : kBlockBytes;
  scale_ = scale_of(place);
  if (place > 0) parent_ = member_at(place & (place - 1));
  for (int step = 1; place + step < n && (place & step) == 0; step *= 2)
    children_.push_back({.member = member_at(place + step), .scale = scale_of(place + step)});
}

std::size_t Tree::scale_of(int place) const {
  const bool has_children = place % 2 == 0 && place + 1 < group_.size;
  return wide_ != nullptr && has_children ? 2 : 1;
}

std::size_t Tree::room_bytes(std::size_t scale) const {
  return std::min<std::size_t>(memory_.size(), 2 * block_bytes_) * scale;
}

void Tree::prepare() {
  const std::size_t size = memory_.size();
  if (adds()) {
    for (Child& child : children_) child.room = scratch().take(room_bytes(child.scale));
    if (parent_ >= 0)
      sums_ = scratch().take(room_bytes(scale_));
    else if (wide_ != nullptr)
      sums_ = scratch().take(kPieceBytes);
  }
  const uint64_t there = this->there(memory_);
  for (Child& child : children_) {
    if (up_) child.from = &add_receive(child.member, size * child.scale, window(child));
    if (down_) add_send(child.member, size, up_ || parent_ >= 0 ? 0 : there).lasting = true;
  }
  if (parent_ < 0) return;
  if (up_) {
    to_parent_ = &add_send(parent_, size * scale_, children_.empty() ? there : 0);
    to_parent_->lasting = children_.empty();  // blocks of sums are used again
  }
  if (down_) add_receive(parent_, size, size);
}

void Tree::more_came() {
  if (adds()) return advance();
  if (to_parent_ != nullptr) to_parent_->ready = there(memory_);
}

std::span<const std::byte> Tree::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  if (&flow != to_parent_) return memory_.subspan(offset, std::min<std::size_t>(max, memory_.size() - offset));
  const uint64_t block = block_bytes_ * scale_;
  std::size_t length = std::min<std::size_t>({max, block - offset % block, flow.total - offset});
  if (offset + length < flow.total) length -= length % kGranuleBytes;
  if (adds()) return {sums_.get() + offset % (2 * block), length};
  watch_.own(memory_.subspan(offset, length));
  return memory_.subspan(offset, length);
}

void Tree::flushed(SendFlow& flow) {
  if (&flow == to_parent_ && adds()) advance();
}

// Results from the root overwrite input only after it was added and sent: the root needs it for the sum.
std::span<std::byte> Tree::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  if (flow.member == parent_) return memory_.subspan(offset, length);
  for (const Child& child : children_) {
    if (child.member != flow.member) continue;
    const uint64_t block = block_bytes_ * child.scale;
    if (offset % block + length > block) return {};
    return {child.room.get() + offset % (2 * block), length};
  }
  return {};
}

void Tree::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  if (flow.member != parent_) return advance();
  watch_.result(memory_, offset, offset + data.size());
  make_ready_below(flow.received);
}

void Tree::make_ready_below(uint64_t upto) {
  for (SendFlow& flow : sends_)
    if (&flow != to_parent_) flow.ready = upto;
}

uint64_t Tree::window(const Child& child) const {
  return std::min<uint64_t>(memory_.size(), (added_ / block_bytes_ + 2) * block_bytes_) * child.scale;
}

void Tree::advance() {
  uint64_t end = there(memory_);
  for (const Child& child : children_) end = std::min<uint64_t>(end, child.from->received / child.scale);
  // A block of sums is overwritten by the next but one, so it must be sent before.
  if (to_parent_ != nullptr) {
    const uint64_t left = to_parent_->sent / scale_ / block_bytes_;
    end = std::min<uint64_t>(end, (left + 2) * block_bytes_);
  }
  if (end < memory_.size()) end -= end % kGranuleBytes;
  if (end <= added_) return;
  const std::size_t piece = wide_ != nullptr ? kPieceBytes / 2 : kPieceBytes;
  while (added_ < end) {
    // Whole pieces, and never across a block's end, where streams continue in their other block.
    const uint64_t block_end = (added_ / block_bytes_ + 1) * block_bytes_;
    const auto bytes = std::min<std::size_t>({end - added_, block_end - added_, piece});
    add(added_, bytes);
    added_ += bytes;
  }
  if (to_parent_ != nullptr)
    to_parent_->ready = added_ * scale_;
  else
    make_ready_below(added_);
  for (Child& child : children_) widen(*child.from, window(child));
}

void Tree::add(uint64_t begin, std::size_t bytes) {
  watch_.own(memory_.subspan(begin, bytes));
  const std::size_t count = bytes / element_bytes_;
  wide_ != nullptr ? add_half(begin, count) : add_wide(begin, count);
  if (parent_ < 0) watch_.result(memory_, begin, begin + bytes);
}

std::byte* Tree::sum_at(uint64_t begin) const { return sums_.get() + begin * scale_ % (2 * block_bytes_ * scale_); }

const std::byte* Tree::input_of(const Child& child, uint64_t begin) const {
  return child.room.get() + begin * child.scale % (2 * block_bytes_ * child.scale);
}

void Tree::add_half(uint64_t begin, std::size_t count) {
  const bool root = parent_ < 0;
  auto* sum = reinterpret_cast<float*>(root ? sums_.get() : sum_at(begin));
  kernels_->load(sum, memory_.data() + begin, count);
  for (const Child& child : children_) {
    const std::byte* input = input_of(child, begin);
    if (child.scale == 1)
      kernels_->accumulate(sum, input, count);
    else
      wide_->combine(sum, sum, input, count);
  }
  if (root) kernels_->store(memory_.data() + begin, sum, static_cast<float>(divisor_), count);
}

void Tree::add_wide(uint64_t begin, std::size_t count) {
  const bool root = parent_ < 0;
  std::byte* to = root ? memory_.data() + begin : sum_at(begin);
  const std::byte* left = memory_.data() + begin;
  for (const Child& child : children_) {
    kernels_->combine(to, left, input_of(child, begin), count);
    left = to;
  }
  if (root && divisor_ > 1 && kernels_->divide != nullptr) kernels_->divide(to, divisor_, count);
}

const AllReduceAlgorithm kTreeAllReduce{Algorithm::kTree,
                                        [](const AllReduceRequest& request) {
                                          return !request.rank_order &&
                                                 fits_tree(request.table, request.world(), request.bytes);
                                        },
                                        [](const GroupView& group, const OperationShape& shape, std::string name,
                                           std::span<std::byte> memory) -> std::unique_ptr<Operation> {
                                          return std::make_unique<Tree>(group, shape, std::move(name), memory);
                                        }};

}  // namespace ringdp

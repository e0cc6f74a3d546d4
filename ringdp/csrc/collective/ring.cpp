#include "collective/ring.h"

#include <algorithm>

namespace ringdp {

Ring::Ring(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> blocks, bool reduce)
    : Operation(std::move(group), shape, std::move(name)),
      blocks_(std::move(blocks)),
      reduce_steps_(reduce ? group_.size - 1 : 0),
      steps_(reduce_steps_ + group_.size - 1),
      element_bytes_(dtype_size(shape.dtype)) {
  if (reduce) kernels_ = &reduce_kernels(shape.dtype, shape.op);
  for (auto block : blocks_) uses(block);
}

void Ring::prepare() {
  uint64_t out_total = 0, in_total = 0;
  for (int step = 0; step < steps_; ++step) {
    out_total += blocks_[out_block(step)].size();
    in_total += blocks_[in_block(step)].size();
  }
  if (reduce_steps_ > 0) segment_ = scratch().take(kSegmentBytes);
  int right = (group_.rank + 1) % group_.size, left = (group_.rank + group_.size - 1) % group_.size;
  add_receive(left, in_total, in_total);
  add_send(right, out_total, blocks_[out_block(0)].size());
}

Ring::Place Ring::locate(Cursor& cursor, uint64_t offset, bool sending) const {
  for (;;) {
    std::span<std::byte> block = blocks_[sending ? out_block(cursor.step) : in_block(cursor.step)];
    if (offset < cursor.begin + block.size() || cursor.step == steps_ - 1)
      return {cursor.step, block.subspan(offset - cursor.begin)};
    cursor.begin += block.size();
    ++cursor.step;
  }
}

std::span<const std::byte> Ring::outgoing(SendFlow&, uint64_t offset, std::size_t max) {
  std::span<std::byte> rest = locate(out_, offset, true).rest;
  if (rest.size() <= max) return rest;
  return rest.first(max - max % kGranuleBytes);
}

std::span<std::byte> Ring::incoming(RecvFlow&, uint64_t offset, std::size_t length) {
  Place place = locate(in_, offset, false);
  if (length > place.rest.size()) return {};
  if (place.step < reduce_steps_) return {segment_.get(), length};
  return place.rest.first(length);
}

void Ring::arrived(RecvFlow&, uint64_t offset, std::span<std::byte> data) {
  Place place = locate(in_, offset, false);
  if (place.step < reduce_steps_) {
    std::byte* own = place.rest.data();
    std::size_t count = data.size() / element_bytes_;
    kernels_->combine(own, data.data(), own, count);
    if (place.step == reduce_steps_ - 1 && kernels_->divide != nullptr && identity().shape.op == ReduceOp::kAvg)
      kernels_->divide(own, static_cast<std::size_t>(group_.size), count);
  }
  // What arrived is what goes to the right next, one block later in the stream.
  SendFlow& send = sends_.front();
  send.ready = std::min(send.total, send.ready + data.size());
}

}  // namespace ringdp

#include "collective/fold.h"

#include <algorithm>

#include "collective/all_reduce.h"

namespace ringdp {

Fold::Fold(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory)
    : Operation(std::move(group), shape, std::move(name)),
      memory_(memory),
      fold_(group_.rank, group_.size, shape.dtype, shape.op, group_.size, group_.far) {
  uses(memory);
}

void Fold::prepare() {
  bool here = folds(group_.rank);
  const std::size_t there = this->there(memory_);
  if (here) {
    fold_.begin(scratch(), memory_, memory_);
    fold_.received(group_.rank, there);
  }
  fold_.watch(&watch_, &watch_);
  // Each rank begins with its right neighbour, so that not all ranks send to the same one at once.
  for (int step = 1; step < group_.size; ++step) {
    int from = (group_.rank + group_.size - step) % group_.size, to = (group_.rank + step) % group_.size;
    if (here) add_receive(from, memory_.size(), fold_.window());
    if (folds(to)) add_send(to, memory_.size(), there).lasting = true;  // the sum overwrites it, after `will_change`
  }
}

void Fold::more_came() {
  const std::size_t there = this->there(memory_);
  for (SendFlow& flow : sends_) flow.ready = there;
  if (!folds(group_.rank)) return;
  fold_.received(group_.rank, there);
  advance();
}

std::span<const std::byte> Fold::outgoing(SendFlow&, uint64_t offset, std::size_t max) {
  std::size_t block_rest = RankOrderFold::kBlockBytes - offset % RankOrderFold::kBlockBytes;
  std::size_t length = std::min<std::size_t>({max, block_rest, memory_.size() - offset});
  if (offset + length < memory_.size()) length -= length % kGranuleBytes;
  return memory_.subspan(offset, length);
}

void Fold::flushed(SendFlow&) {
  if (folds(group_.rank)) advance();
}

std::span<std::byte> Fold::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  return fold_.room(flow.member, offset, length);
}

void Fold::arrived(RecvFlow& flow, uint64_t, std::span<std::byte>) {
  fold_.received(flow.member, flow.received);
  advance();
}

bool Fold::take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
  uint64_t before = fold_.window();
  if (offset == fold_.folded()) will_change(memory_.subspan(offset, data.size()));
  if (!fold_.take(flow.member, offset, data, sent_to_all())) return Operation::take(flow, offset, data);
  widen_from(before);
  return true;
}

// The result overwrites the input, so only bytes that were sent to all peers may be folded.
uint64_t Fold::sent_to_all() const {
  uint64_t limit = memory_.size();
  for (const SendFlow& flow : sends_) limit = std::min(limit, flow.sent);
  return limit;
}

void Fold::advance() {
  const uint64_t before = fold_.window(), limit = sent_to_all(), end = fold_.reach(limit);
  if (end > fold_.folded()) will_change(memory_.subspan(fold_.folded(), end - fold_.folded()));
  fold_.advance(limit);
  widen_from(before);
}

void Fold::widen_from(uint64_t before) {
  if (fold_.window() == before) return;
  for (RecvFlow& flow : receives_) widen(flow, fold_.window());
}

const AllReduceAlgorithm kFoldAllReduce{
    Algorithm::kFold,
    [](const AllReduceRequest& request) { return fits_fold(request.table, request.world(), request.bytes); },
    [](const GroupView& group, const OperationShape& shape, std::string name, std::span<std::byte> memory)
        -> std::unique_ptr<Operation> { return std::make_unique<Fold>(group, shape, std::move(name), memory); }};

}  // namespace ringdp

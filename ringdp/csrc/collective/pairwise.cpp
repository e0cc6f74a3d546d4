#include "collective/pairwise.h"

#include <algorithm>

#include "collective/all_reduce.h"
#include "collective/chunks.h"

namespace ringdp {

Pairwise::Pairwise(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> chunks,
                   std::span<std::byte> out)
    : Operation(std::move(group), shape, std::move(name)),
      chunks_(std::move(chunks)),
      scratch_(nullptr, {}),
      own_out_(shape.what == Collective::kReduceScatter ? out : chunks_[group_.rank]),
      fold_(group_.rank, group_.size, shape.dtype, shape.op, group_.size, group_.far) {
  for (auto chunk : chunks_) uses(chunk);
  uses(out);
}

bool Pairwise::collects(int member) const {
  const OperationShape& shape = identity().shape;
  return shape.what == Collective::kAllReduce || (shape.what == Collective::kReduce && member == shape.root);
}

// A flow to rank j: my part of chunk j, then (all-reduce, reduce) the sum of my own chunk as it gets ready.
void Pairwise::prepare() {
  if (identity().shape.what == Collective::kReduce && !collects(group_.rank)) {
    scratch_ = scratch().take(own_out_.size());
    own_out_ = {scratch_.get(), own_out_.size()};
  }
  fold_.begin(scratch(), chunks_[group_.rank], own_out_);
  fold_.received(group_.rank, there(chunks_[group_.rank]));
  fold_.watch(&watch_, &watch_);
  std::size_t mine = own_out_.size();
  for (int step = 1; step < group_.size; ++step) {
    int to = (group_.rank + step) % group_.size, from = (group_.rank + group_.size - step) % group_.size;
    std::size_t back = collects(group_.rank) ? chunks_[from].size() : 0, result = collects(to) ? mine : 0;
    add_receive(from, mine + back, receive_window(mine + back));
    // Its part of their chunk is overwritten by their sum, of which it is a part.
    add_send(to, chunks_[to].size() + result, ready(to)).lasting = true;
  }
}

uint64_t Pairwise::ready(int member) const {
  const std::size_t input = chunks_[member].size(), here = there(chunks_[member]);
  if (here < input) return here;
  return collects(member) ? input + fold_.folded() : input;
}

void Pairwise::more_came() {
  for (SendFlow& flow : sends_) flow.ready = ready(flow.member);
  fold_.received(group_.rank, there(chunks_[group_.rank]));
  advance();
}

std::span<const std::byte> Pairwise::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  std::span<const std::byte> theirs = chunks_[flow.member];
  if (offset < theirs.size()) {
    std::size_t block_rest = RankOrderFold::kBlockBytes - offset % RankOrderFold::kBlockBytes;
    std::size_t length = std::min<std::size_t>({max, block_rest, theirs.size() - offset});
    if (offset + length < theirs.size()) length -= length % kGranuleBytes;
    watch_.own(theirs.subspan(offset, length));
    return theirs.subspan(offset, length);
  }
  std::span<const std::byte> result = own_out_;
  return result.subspan(offset - theirs.size(), std::min<std::size_t>(max, result.size() - (offset - theirs.size())));
}

std::span<std::byte> Pairwise::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  if (offset < own_out_.size()) return fold_.room(flow.member, offset, length);
  std::span<std::byte> result = chunks_[flow.member];
  offset -= own_out_.size();
  if (offset + length > result.size()) return {};
  return result.subspan(offset, length);
}

void Pairwise::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  if (offset >= own_out_.size()) {
    const std::size_t at = offset - own_out_.size();
    return watch_.result(chunks_[flow.member], at, at + data.size());
  }
  fold_.received(flow.member, std::min<uint64_t>(flow.received, own_out_.size()));
  advance();
}

// Once there is room for all that is left of this rank's chunk, results may follow without bound: they go into place.
uint64_t Pairwise::receive_window(uint64_t total) const {
  return fold_.window() == own_out_.size() ? total : fold_.window();
}

bool Pairwise::take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
  uint64_t before = fold_.folded();
  if (!fold_.take(flow.member, offset, data, own_out_.size())) return Operation::take(flow, offset, data);
  go_on_from(before);
  return true;
}

void Pairwise::advance() {
  uint64_t before = fold_.folded();
  fold_.advance(own_out_.size());
  go_on_from(before);
}

void Pairwise::go_on_from(uint64_t before) {
  if (fold_.folded() == before) return;
  for (RecvFlow& flow : receives_) widen(flow, receive_window(flow.total));
  for (SendFlow& flow : sends_) flow.ready = ready(flow.member);
}

// A ring would round half types at each step, its order of summation follows the place in the buffer, and between far hosts
// it takes a round trip for every two ranks.
const AllReduceAlgorithm kPairwiseAllReduce{
    Algorithm::kPairwise,
    [](const AllReduceRequest& request) {
      const bool in_pairs =
          goes_direct(request.table, request.world()) && request.bytes <= request.table.pairwise_bytes;
      return request.rank_order || request.dtype == DType::kFloat16 || request.dtype == DType::kBfloat16 || in_pairs;
    },
    [](const GroupView& group, const OperationShape& shape, std::string name,
       std::span<std::byte> memory) -> std::unique_ptr<Operation> {
      return std::make_unique<Pairwise>(group, shape, std::move(name), split(memory, group.size, shape.dtype),
                                        std::span<std::byte>{});
    }};

}  // namespace ringdp

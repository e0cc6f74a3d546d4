#include "collective/pairwise.h"

#include <algorithm>
#include <utility>

#include "collective/all_reduce.h"
#include "collective/scattered.h"

namespace ringdp {
namespace {

// Eager bytes of a peer's chunk between far hosts, where a grant takes as long as the first bytes. A quarter of the
// peer's window, so that several operations have room.
constexpr uint64_t kFarEagerBytes = kEagerWindowBytes / 4;

}  // namespace

Pairwise::Pairwise(GroupView group, OperationShape shape, std::string name, std::vector<Scattered> chunks,
                   Scattered out)
    : Operation(std::move(group), shape, std::move(name)),
      chunks_(std::move(chunks)),
      scratch_(nullptr, {}),
      own_out_(shape.what == Collective::kReduceScatter ? std::move(out) : chunks_[group_.rank]),
      fold_(group_.rank, group_.size, shape.dtype, shape.op, group_.size, group_.far, /*in_stages=*/true) {
  for (const Scattered& chunk : chunks_)
    for (auto place : chunk.places()) uses(place);
  if (shape.what == Collective::kReduceScatter)
    for (auto place : own_out_.places()) uses(place);
}

bool Pairwise::collects(int member) const {
  const OperationShape& shape = identity().shape;
  return shape.what == Collective::kAllReduce || (shape.what == Collective::kReduce && member == shape.root);
}

// A flow to rank j: my part of chunk j, then (all-reduce, reduce) the sum of my own chunk as it gets ready.
void Pairwise::prepare() {
  if (identity().shape.what == Collective::kReduce && !collects(group_.rank)) {
    scratch_ = scratch().take(own_out_.size());
    own_out_ = Scattered({scratch_.get(), own_out_.size()});
  }
  fold_.begin(scratch(), chunks_[group_.rank], own_out_);
  fold_.received(group_.rank, here(chunks_[group_.rank]));
  fold_.watch(&watch_, &watch_);
  std::size_t mine = own_out_.size();
  for (int step = 1; step < group_.size; ++step) {
    int to = (group_.rank + step) % group_.size, from = (group_.rank + group_.size - step) % group_.size;
    std::size_t back = collects(group_.rank) ? chunks_[from].size() : 0, result = collects(to) ? mine : 0;
    add_receive(from, mine + back, receive_window(mine + back));
    // Their sum overwrites its part of their chunk.
    SendFlow& flow = add_send(to, chunks_[to].size() + result, ready(to));
    flow.lasting = true;
    if (group_.far && result > 0) flow.eager = std::clamp<uint64_t>(chunks_[to].size(), flow.eager, kFarEagerBytes);
  }
}

std::size_t Pairwise::here(const Scattered& input) const {
  std::size_t come = 0;
  for (const auto place : input.places()) {
    const std::size_t of_it = there(place);
    come += of_it;
    if (of_it < place.size()) break;
  }
  return come;
}

uint64_t Pairwise::ready(int member) const {
  const std::size_t input = chunks_[member].size(), come = here(chunks_[member]);
  if (come < input) return come;
  return collects(member) ? input + fold_.folded() : input;
}

void Pairwise::more_came() {
  for (SendFlow& flow : sends_) flow.ready = ready(flow.member);
  fold_.received(group_.rank, here(chunks_[group_.rank]));
  advance();
}

std::span<const std::byte> Pairwise::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  const Scattered& theirs = chunks_[flow.member];
  if (offset >= theirs.size()) return own_out_.at(offset - theirs.size(), max);
  const std::size_t block_rest = RankOrderFold::kBlockBytes - offset % RankOrderFold::kBlockBytes;
  std::span<const std::byte> next = theirs.at(offset, theirs.size());
  if (const std::size_t most = std::min(max, block_rest); most < next.size()) {
    const std::size_t over = (offset + most) % kGranuleBytes;
    next = next.first(most - std::min(most, over));
  }
  watch_.own(next);
  return next;
}

std::span<std::byte> Pairwise::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  if (offset < own_out_.size()) return fold_.room(flow.member, offset, length);
  return chunks_[flow.member].at(offset - own_out_.size(), length);
}

void Pairwise::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  if (offset >= own_out_.size()) {
    const std::size_t at = offset - own_out_.size();
    if (!data.empty())
      watch_.result(chunks_[flow.member].places().front(), at, at + data.size());  // an all-reduce's only one
    return;
  }
  fold_.received(flow.member, std::min<uint64_t>(flow.received, own_out_.size()));
  advance();
}

// Once there is room for the rest of this rank's chunk, results may follow without limit: they are received in place.
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

// A ring would round half types at each step, its order of summation depends on the place in the buffer, and between
// far hosts each step takes half a round trip.
const AllReduceAlgorithm kPairwiseAllReduce{
    Algorithm::kPairwise,
    [](const AllReduceRequest& request) {
      const bool in_pairs =
          goes_direct(request.table, request.world()) && request.bytes <= request.table.pairwise_bytes;
      return request.rank_order || request.dtype == DType::kFloat16 || request.dtype == DType::kBfloat16 || in_pairs;
    },
    [](const GroupView& group, const OperationShape& shape, std::string name,
       std::span<std::byte> memory) -> std::unique_ptr<Operation> {
      // Several ranks on a host own alike: pairs between hosts are for one on each.
      const bool weighted = group.weights.size() == group.hosts.size();
      const auto chunks = split(memory, group.size, shape.dtype,
                                weighted ? std::span<const uint32_t>(group.weights) : std::span<const uint32_t>());
      return std::make_unique<Pairwise>(group, shape, std::move(name), by_part({chunks}, group.size), Scattered());
    }};

}  // namespace ringdp

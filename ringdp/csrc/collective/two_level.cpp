#include "collective/two_level.h"

#include <algorithm>

#include "collective/all_reduce.h"
#include "collective/two_level_plan.h"
#include "collective/two_level_scatter.h"

namespace ringdp {
namespace {

// Pieces per peer that are kept here until those of other peers have come or until their sum is sent: at most 128 KiB
// each. Between far hosts as many as a long path holds.
constexpr std::size_t kHeldPieces = 2;
constexpr std::size_t kFarHeldPieces = 256;

}  // namespace

TwoLevel::TwoLevel(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> chunks,
                   std::span<std::byte> out)
    : Operation(std::move(group), shape, std::move(name)),
      hosts_(group_),
      held_pieces_(group_.far ? kFarHeldPieces : kHeldPieces),
      chunks_(std::move(chunks)),
      result_(out) {
  for (auto chunk : chunks_) uses(chunk);
  uses(out);
}

void TwoLevel::prepare() {
  const OperationShape& shape = identity().shape;
  if (shape.what == Collective::kReduceScatter)
    plan_ = std::make_unique<ReduceScatterPlan>(hosts_, chunks_, result_, shape.dtype, shape.op);
  else
    plan_ = std::make_unique<AllReducePlan>(hosts_, chunks_[0], shape.dtype, shape.op, group_.far);
  out_of_.resize(static_cast<std::size_t>(group_.size));
  in_of_.resize(static_cast<std::size_t>(group_.size));
  for (Stream& stream : plan_->incoming()) {
    in_of_[static_cast<std::size_t>(stream.member)] = in_.size();
    Incoming& in = in_.emplace_back(stream);
    in.flow = &add_receive(stream.member, stream.total, widened(in));
  }
  for (Stream& stream : plan_->outgoing()) {
    out_of_[static_cast<std::size_t>(stream.member)] = out_.size();
    Outgoing& out = out_.emplace_back(stream);
    out.flow = &add_send(stream.member, stream.total, 0);
    // In an all-reduce later sums overwrite its input and partial sums. A reduce-scatter reuses its rooms.
    out.flow->lasting = shape.what == Collective::kAllReduce;
    make_ready(out);
  }
}

void TwoLevel::begin_sum(Stage& stage) {
  const OperationShape& shape = identity().shape;
  stage.fold = std::make_unique<RankOrderFold>(stage.place, stage.parts, shape.dtype, shape.op, stage.divisor);
  if (stage.passes_through) {
    stage.room = scratch().take(stage.size);
    stage.memory = {stage.room.get(), stage.size};
  }
  stage.fold->begin(scratch(), stage.own != nullptr ? stage.own->memory : stage.input, stage.memory);
  stage.fold->watch(stage.adds_input() ? &watch_ : nullptr, stage.final ? &watch_ : nullptr);
  if (stage.own != nullptr) stage.fold->received(stage.place, 0);
}

std::size_t TwoLevel::advance(Stage& stage) {
  if (stage.kind != Stage::Kind::kSum || stage.complete()) return stage.done;
  if (stage.fold == nullptr) {
    if (stage.parts > 1) return 0;  // no bytes have come
    begin_sum(stage);
  }
  if (stage.own != nullptr) stage.fold->received(stage.place, advance(*stage.own));
  stage.done = stage.fold->advance(stage.size);
  if (stage.complete()) stage.fold.reset();
  return stage.done;
}

// How far the peer may send. Copies are received in place, as are bytes to which this rank adds only its own part,
// once that is complete. A sum that waits for other peers, or is forwarded, keeps its bytes: only a few of those may
// be open, besides the eager ones.
uint64_t TwoLevel::widened(Incoming& in) {
  auto holds = [](const Stage& stage) {
    if (stage.kind != Stage::Kind::kSum) return false;
    if (stage.passes_through) return !stage.sent;
    return !stage.complete() && (stage.parts > 2 || !stage.own_complete());
  };
  const std::vector<Piece>& pieces = in.stream->pieces;
  std::erase_if(in.held, [&](Stage* stage) { return !holds(*stage); });
  while (in.open < pieces.size() && (in.held.size() < held_pieces_ || pieces[in.open].begin < kSmallFlowBytes)) {
    Stage& stage = *pieces[in.open++].stage;
    if (holds(stage)) in.held.push_back(&stage);
  }
  return in.open < pieces.size() ? pieces[in.open].begin : in.stream->total;
}

void TwoLevel::make_ready(Outgoing& out) {
  const std::vector<Piece>& pieces = out.stream->pieces;
  for (; out.ready < pieces.size(); ++out.ready) {
    const Piece& piece = pieces[out.ready];
    bool alone = piece.stage->passes_through && piece.stage->parts == 1;
    if (alone && out.ready >= out.sent + held_pieces_) return;  // it does not depend on another rank's bytes
    std::size_t there = advance(*piece.stage);
    out.flow->ready = piece.begin + there;
    if (there < piece.stage->size) return;
  }
}

void TwoLevel::move_on() {
  for (Outgoing& out : out_) make_ready(out);
  for (Incoming& in : in_)
    if (uint64_t window = widened(in); window > in.flow->window) widen(*in.flow, window);
}

std::span<const std::byte> TwoLevel::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  Outgoing& out = out_[out_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = out.stream->pieces;
  while (offset >= pieces[out.current].end()) ++out.current;
  const Piece& piece = pieces[out.current];
  std::span<std::byte> next = piece.stage->memory.subspan(offset - piece.begin);
  if (next.size() > max) next = next.first(max - max % kGranuleBytes);
  if (piece.stage->kind == Stage::Kind::kInput) watch_.own(next);
  return next;
}

const TwoLevel::Piece& TwoLevel::piece_at(RecvFlow& flow, uint64_t offset) {
  Incoming& in = in_[in_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = in.stream->pieces;
  while (offset >= pieces[in.current].end()) ++in.current;
  return pieces[in.current];
}

std::span<std::byte> TwoLevel::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  const Piece& piece = piece_at(flow, offset);
  Stage& stage = *piece.stage;
  offset -= piece.begin;
  if (offset + length > stage.size) return {};
  if (stage.kind == Stage::Kind::kCopy) return stage.memory.subspan(offset, length);
  if (stage.fold == nullptr) begin_sum(stage);
  return stage.fold->room(piece.part, offset, length);
}

void TwoLevel::flushed(SendFlow& flow) {
  Outgoing& out = out_[out_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = out.stream->pieces;
  bool freed = false;
  for (; out.sent < pieces.size() && pieces[out.sent].end() <= flow.sent; ++out.sent) {
    Stage& stage = *pieces[out.sent].stage;
    if (!stage.passes_through) continue;
    stage.sent = freed = true;
    stage.room.reset();
  }
  if (freed) move_on();
}

void TwoLevel::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  if (data.empty()) return;
  const Piece& piece = piece_at(flow, offset);
  Stage& stage = *piece.stage;
  std::size_t upto = offset - piece.begin + data.size();
  if (stage.kind == Stage::Kind::kCopy) {
    watch_.result(stage.memory, offset - piece.begin, upto);
    stage.done = upto;
  } else {
    stage.fold->received(piece.part, upto);
    advance(stage);
    if (stage.next != nullptr) advance(*stage.next);
  }
  move_on();
}

// Bytes of another rank of the host in shared memory are added without a copy if the sum lacks no other bytes.
bool TwoLevel::take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
  const Piece& piece = piece_at(flow, offset);
  Stage& stage = *piece.stage;
  if (stage.kind != Stage::Kind::kSum || offset + data.size() > piece.end()) return Operation::take(flow, offset, data);
  if (stage.fold == nullptr) begin_sum(stage);
  advance(stage);
  std::size_t limit = stage.own != nullptr ? stage.own->done : stage.size;
  if (!stage.fold->take(piece.part, offset - piece.begin, data, limit)) return Operation::take(flow, offset, data);
  advance(stage);
  if (stage.next != nullptr) advance(*stage.next);
  move_on();
  return true;
}

const AllReduceAlgorithm kTwoLevelAllReduce{
    Algorithm::kTwoLevel,
    [](const AllReduceRequest& request) {
      return !request.rank_order && layout_of(request.hosts) == Layout::kSeveralRanksPerHost;
    },
    [](const GroupView& group, const OperationShape& shape, std::string name,
       std::span<std::byte> memory) -> std::unique_ptr<Operation> {
      return std::make_unique<TwoLevel>(group, shape, std::move(name), std::vector{memory}, std::span<std::byte>{});
    }};

}  // namespace ringdp

#include "collective/two_level.h"

#include <algorithm>
#include <numeric>

#include "collective/all_reduce.h"
#include "collective/scattered.h"

namespace ringdp {

ReduceScatterPlan::ReduceScatterPlan(const HostMap& hosts, const std::vector<std::span<std::byte>>& chunks,
                                     std::span<std::byte> out, DType dtype, ReduceOp op)
    : hosts_(hosts),
      half_(dtype == DType::kFloat16 || dtype == DType::kBfloat16),
      ranks_(op == ReduceOp::kAvg ? hosts.ranks : 1) {
  int count = static_cast<int>((out.size() + RankOrderFold::kBlockBytes - 1) / RankOrderFold::kBlockBytes);
  Chunks blocks(out.size(), count, dtype_size(dtype));
  for (int number = 0; number < count; ++number) {
    std::size_t begin = blocks.begin(number), size = blocks.size(number);
    if (size == 0) continue;
    for (int home = 0; home < hosts_.count(); ++home) {
      const std::vector<int>& members = hosts_.members[static_cast<std::size_t>(home)];
      for (int place = 0; place < static_cast<int>(members.size()); ++place) {
        auto member = static_cast<std::size_t>(members[static_cast<std::size_t>(place)]);
        make_block(home, place, chunks[member].subspan(begin, size), out.subspan(begin, size));
      }
    }
  }
}

void ReduceScatterPlan::make_block(int home, int place, std::span<std::byte> input, std::span<std::byte> out) {
  const std::vector<int>& local = hosts_.local();
  int here = hosts_.here, parts = static_cast<int>(local.size());
  int adder = hosts_.carrier(here, place), owner = hosts_.carrier(home, place);
  if (adder != local[static_cast<std::size_t>(hosts_.place)])
    return add_outgoing(adder, add_stage(Stage::Kind::kInput, input));
  // The mean of half types is taken here, as in an all-reduce.
  int divisor = half_ ? ranks_ : 1;
  bool adds = parts > 1 || divisor > 1;
  Stage& of_host = adds ? add_sum(home == here ? out : input, parts, hosts_.place, divisor, nullptr)
                        : add_stage(Stage::Kind::kInput, input);
  of_host.input = input;
  of_host.passes_through = adds && home != here;
  for (int part = 0; part < parts; ++part)
    if (part != hosts_.place) add_incoming(local[static_cast<std::size_t>(part)], of_host, part);
  if (home != here) return add_outgoing(owner, of_host);
  Stage& sum = add_sum(out, hosts_.count(), here, half_ ? 1 : ranks_, &of_host);
  for (int other = 0; other < hosts_.count(); ++other)
    if (other != here) add_incoming(hosts_.carrier(other, place), sum, other);
}

namespace {

// Part of the order of summation (docs/reference/algorithms.md): how the buffer is cut.
constexpr std::size_t kBlockBytes = RankOrderFold::kBlockBytes;  // longest
constexpr std::size_t kLeastBlockBytes = 16 * 1024;              // shorter only so that every rank gets a share
constexpr std::size_t kMostUnitBytes = 256;  // by which a block by weight may be longer than its part of the whole
constexpr int kLeastRounds = 4;              // shares of each carrier: the work inside overlaps the wire

// The pipeline's depth, in rounds of a share for every carrier; the bits do not depend on it. Inputs are sent inside a
// host so many rounds before they are needed between hosts, and between hosts a share waits for its next step while so
// many others take theirs, so that the line is busy while a block is in flight. Between far hosts all shares take a
// step before the first of them takes the next.
constexpr int kLead = 4;
constexpr int kLag = 4;

}  // namespace

int two_level_shares(std::size_t bytes, int hosts, int most, const Weights& weights) {
  auto h = static_cast<std::size_t>(hosts), k = static_cast<std::size_t>(most);
  std::size_t longest = h * kBlockBytes;
  if (!weights.empty()) {
    const uint64_t whole = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
    longest = (kBlockBytes - kMostUnitBytes) * whole / *std::max_element(weights.begin(), weights.end());
  }
  std::size_t needed = (bytes + longest - 1) / longest;
  std::size_t wanted = std::min(kLeastRounds * k, bytes / (h * kLeastBlockBytes));
  std::size_t count = std::max<std::size_t>({needed, wanted, 1});
  return static_cast<int>((count + k - 1) / k * k);
}

// The three loops make the schedule: in turn t the shares of round t are added up inside the hosts, those of rounds
// that began earlier make one more step between the hosts, and finished blocks go to the other ranks of the host.
// kLead and kLag say how many turns lie between these, so that the next block is there when a carrier needs it; the
// bits do not depend on them. Every rank runs the same loops and keeps only its own stages, which is why two ranks
// agree on the order of their stream.
AllReducePlan::AllReducePlan(const HostMap& hosts, std::span<std::byte> memory, DType dtype, ReduceOp op, bool far)
    : hosts_(hosts),
      memory_(memory),
      element_bytes_(dtype_size(dtype)),
      half_(dtype == DType::kFloat16 || dtype == DType::kBfloat16),
      in_pairs_(half_ || far || !hosts.weights.empty()),
      ranks_(op == ReduceOp::kAvg ? hosts.ranks : 1),
      share_count_(two_level_shares(memory.size(), hosts.count(), hosts.most, hosts.weights)),
      steps_(in_pairs_ ? 2 : 2 * (hosts.count() - 1)),
      shares_(memory.size(), share_count_, element_bytes_),
      latest_(static_cast<std::size_t>(share_count_ * hosts.count())) {
  const int rounds = share_count_ / hosts_.most, lag = far ? std::max(rounds, kLag) : kLag;
  auto for_round = [&](int round, auto make) {
    if (round < 0 || round >= rounds) return;
    for (int share = round * hosts_.most; share < (round + 1) * hosts_.most; ++share) make(share);
  };
  for (int turn = 0; turn <= rounds + kLead + lag * (steps_ - 1); ++turn) {
    for_round(turn, [&](int share) { make_inside(share); });
    for (Step step = 0; step < steps_; ++step)
      for_round(turn - kLead - lag * step, [&](int share) {
        if (!carries(share)) return;
        if (in_pairs_)
          make_exchange_step(share, step);
        else
          make_ring_step(share, step);
      });
    for (Step step = 0; step < steps_; ++step)
      for_round(turn - kLead - lag * step - 1, [&](int share) { make_results(share, step); });
  }
}

std::span<std::byte> AllReducePlan::block(int share, int number) const {
  std::span<std::byte> whole = memory_.subspan(shares_.begin(share), shares_.size(share));
  Chunks blocks(whole.size(), hosts_.count(), element_bytes_, hosts_.weights);
  return whole.subspan(blocks.begin(number), blocks.size(number));
}

Stage*& AllReducePlan::latest(int share, int number) {
  return latest_[static_cast<std::size_t>(share * hosts_.count() + number)];
}

// Blocks in the order of the ring.
void AllReducePlan::make_inside(int share) {
  const std::vector<int>& local = hosts_.local();
  int parts = static_cast<int>(local.size());
  for (int i = 0; i < hosts_.count(); ++i) {
    int number = host_after(hosts_.here, -i);
    std::span<std::byte> memory = block(share, number);
    if (memory.empty()) continue;
    if (!carries(share)) {
      add_outgoing(carrier(hosts_.here, share), add_stage(Stage::Kind::kInput, memory));
      continue;
    }
    // The mean of half types is taken here, so that no partial sum overflows if the mean does not.
    int divisor = half_ ? ranks_ : 1;
    bool adds = parts > 1 || divisor > 1;
    Stage& sum = adds ? add_sum(memory, parts, hosts_.place, divisor, nullptr) : add_stage(Stage::Kind::kInput, memory);
    for (int part = 0; part < parts; ++part)
      if (part != hosts_.place) add_incoming(local[static_cast<std::size_t>(part)], sum, part);
    latest(share, number) = &sum;
  }
}

// Step k takes block H-k from host H to the next one: h-1 steps that add, then h-1 that copy, as in ring.h.
void AllReducePlan::make_ring_step(int share, Step step) {
  int h = hosts_.count(), here = hosts_.here;
  int leaving = host_after(here, -step), coming = host_after(here, -1 - step);
  if (Stage* sent = latest(share, leaving)) add_outgoing(carrier(host_after(here, 1), share), *sent);
  std::span<std::byte> memory = block(share, coming);
  if (memory.empty()) return;
  bool adds = step < h - 1;
  int divisor = step == h - 2 ? ranks_ : 1;
  Stage& got = adds ? add_sum(memory, 2, 1, divisor, latest(share, coming)) : add_stage(Stage::Kind::kCopy, memory);
  got.final = step == h - 2;
  add_incoming(carrier(host_after(here, -1), share), got);
  latest(share, coming) = &got;
}

// Step 0 takes each host's block to it, where all of them are added in the order of the hosts; step 1 takes the sums
// to all.
void AllReducePlan::make_exchange_step(int share, Step step) {
  int h = hosts_.count(), here = hosts_.here;
  Stage* mine = latest(share, here);
  Stage* sum = step == 0 && mine != nullptr ? &add_sum(mine->memory, h, here, half_ ? 1 : ranks_, mine) : nullptr;
  for (int i = 1; i < h; ++i) {
    int other = host_after(here, i);
    int peer = carrier(other, share);
    Stage* theirs = latest(share, other);
    if (step == 0) {
      if (theirs != nullptr) add_outgoing(peer, *theirs);
      if (sum != nullptr) add_incoming(peer, *sum, other);
      continue;
    }
    if (mine != nullptr) add_outgoing(peer, *mine);
    if (theirs == nullptr) continue;
    Stage& got = add_stage(Stage::Kind::kCopy, theirs->memory);
    add_incoming(peer, got);
    latest(share, other) = &got;
  }
  if (sum == nullptr) return;
  sum->final = true;
  latest(share, here) = sum;
}

std::vector<int> AllReducePlan::finished_blocks(Step step) const {
  int h = hosts_.count(), here = hosts_.here;
  if (!in_pairs_) {
    if (step < h - 2) return {};
    return {host_after(here, -1 - step)};
  }
  if (step == 0) return {here};
  std::vector<int> others;
  for (int i = 1; i < h; ++i) others.push_back(host_after(here, i));
  return others;
}

void AllReducePlan::make_results(int share, Step step) {
  for (int number : finished_blocks(step)) {
    std::span<std::byte> memory = block(share, number);
    if (memory.empty()) continue;
    if (!carries(share)) {
      add_incoming(carrier(hosts_.here, share), add_stage(Stage::Kind::kCopy, memory));
      continue;
    }
    for (int member : hosts_.local())
      if (member != carrier(hosts_.here, share)) add_outgoing(member, *latest(share, number));
  }
}

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

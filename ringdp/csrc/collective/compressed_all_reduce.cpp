#include "collective/compressed_all_reduce.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "base/deadline.h"
#include "kernels/kernels.h"

namespace ringdp {
namespace {

// The most that is kept here per peer until other peers' codes have come.
constexpr uint64_t kHeldBytes = 256 * 1024;

// Adds its lifetime to the report's coding time.
class CodingTime {
 public:
  explicit CodingTime(FiniteReport* report)
      : report_(report), begin_(report != nullptr ? Clock::now() : Clock::time_point{}) {}
  ~CodingTime() {
    if (report_ != nullptr)
      report_->coding_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count();
  }
  CodingTime(const CodingTime&) = delete;
  CodingTime& operator=(const CodingTime&) = delete;

 private:
  FiniteReport* const report_;
  const Clock::time_point begin_;
};

}  // namespace

CompressedAllReduce::CompressedAllReduce(GroupView group, OperationShape shape, std::string name,
                                         std::vector<CompressedSection> sections, const Compression& compression,
                                         std::shared_ptr<FiniteReport> report)
    : Operation(std::move(group), shape, std::move(name)),
      sections_(std::move(sections)),
      compression_(compression),
      codec_(codec(compression.codec)),
      report_(std::move(report)),
      hosts_(code_hosts(group_)) {
  watch(report_);
  for (const CompressedSection& it : sections_) {
    uses(std::as_bytes(std::span(it.x, it.count)));
    if (it.to != nullptr) uses(std::as_bytes(std::span(it.to, it.count)));
    if (it.residual == nullptr) continue;
    uses(std::as_bytes(std::span(it.residual, it.count)));
    uses(std::as_bytes(std::span(it.new_residual, it.count)));
  }
}

void CompressedAllReduce::prepare() {
  if (report_ != nullptr) *report_ = {};
  if (group_.size == 1) {
    for (const CompressedSection& it : sections_) {
      look_at(it.x, it.count);
      if (it.to != nullptr) std::memcpy(it.to, it.x, it.count * sizeof(float));
    }
    if (report_ != nullptr) report_->finite = report_->own == nullptr;
    return;
  }
  plan_.emplace(hosts_, sections_, codec_, group_.far);
  for (const Segment& segment : plan_->segments()) {
    State& state = states_.emplace_back();
    if (plan_->carries(segment)) state.inputs_missing = hosts_.local().size() - 1;
    if (plan_->owns(segment)) state.codes_missing = static_cast<std::size_t>(hosts_.count()) - 1;
  }
  sum_ = scratch().take(CompressedPlan::kTileElements * sizeof(float));
  add_flows();
}

void CompressedAllReduce::add_flows() {
  stream_of_.resize(static_cast<std::size_t>(group_.size));
  for (const Stream& stream : plan_->outgoing()) {
    stream_of_[static_cast<std::size_t>(stream.member)] = out_.size();
    for (const Piece& piece : stream.pieces)
      if (piece.kind == Kind::kResult) ++states_[piece.segment].sends;
    SendFlow& flow = add_send(stream.member, stream.total(), 0);
    flow.encodes = true;
    out_.push_back({.stream = &stream, .flow = &flow});
  }
  for (const Stream& stream : plan_->incoming()) {
    in_.push_back({.stream = &stream});
    in_.back().flow = &add_receive(stream.member, stream.total(), widened(in_.back()));
    in_.back().flow->decodes = true;
  }
  for (Outgoing& out : out_) make_ready(out);
}

bool CompressedAllReduce::ready(const Piece& piece) const {
  const State& state = states_[piece.segment];
  if (piece.kind == Kind::kInput) return true;
  return piece.kind == Kind::kCode ? state.inputs_missing == 0 : state.done;
}

bool CompressedAllReduce::consumed(const Piece& piece) const {
  const State& state = states_[piece.segment];
  if (piece.kind == Kind::kInput) return state.inputs_missing == 0;
  return state.done && (piece.kind == Kind::kCode || state.sends == 0);
}

// How far the peer may send: some pieces more than were consumed, and the eager ones. Between far hosts all codes,
// since each grant would take a round trip; they are at most as long as the code of the buffer.
uint64_t CompressedAllReduce::widened(Incoming& in) {
  const std::vector<Piece>& pieces = in.stream->pieces;
  while (in.held < in.open && consumed(pieces[in.held])) ++in.held;
  auto may_come = [&](const Piece& piece) {
    return in.open < in.held + 2 || piece.begin < kSmallFlowBytes ||
           piece.end() - pieces[in.held].begin <= kHeldBytes || (group_.far && piece.kind != Kind::kInput);
  };
  while (in.open < pieces.size() && may_come(pieces[in.open])) ++in.open;
  return in.open < pieces.size() ? pieces[in.open].begin : in.stream->total();
}

void CompressedAllReduce::make_ready(Outgoing& out) {
  const std::vector<Piece>& pieces = out.stream->pieces;
  while (out.ready < pieces.size() && ready(pieces[out.ready])) out.flow->ready = pieces[out.ready++].end();
}

void CompressedAllReduce::move_on() {
  for (Outgoing& out : out_) make_ready(out);
  for (Incoming& in : in_)
    if (const uint64_t window = widened(in); window > in.flow->window) widen(*in.flow, window);
}

// ---- Sending ----

std::span<const std::byte> CompressedAllReduce::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  Outgoing& out = out_[stream_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = out.stream->pieces;
  while (offset >= pieces[out.current].end()) ++out.current;
  const Piece& piece = pieces[out.current];
  const Segment& segment = plan_->segments()[piece.segment];
  offset -= piece.begin;
  if (piece.kind == Kind::kInput) return input(segment, offset, max);
  const std::byte* code = states_[piece.segment].result.get();
  if (piece.kind == Kind::kCode) {
    if (offset == 0) {
      // Encoded only now, so that it is sent from the cache; one piece of a stream is in progress at a time.
      if (out.code == nullptr) out.code = scratch().take(plan_->longest_code());
      encode(segment, out.code.get());
    }
    code = out.code.get();
  }
  return std::span(code, piece.bytes).subspan(offset).first(std::min<std::size_t>(max, piece.bytes - offset));
}

// The contiguous part of it.
std::span<const std::byte> CompressedAllReduce::input(const Segment& segment, uint64_t offset, std::size_t max) {
  const auto tiles = plan_->tiles(segment);
  const std::size_t element = offset / sizeof(float);
  auto tile = std::find_if(tiles.begin(), tiles.end(), [&](const Tile& it) { return element < it.element + it.count; });
  const float* begin = x(*tile) + (element - tile->element);
  const float* end = x(*tile) + tile->count;
  while (++tile != tiles.end() && x(*tile) == end) end += tile->count;
  max -= max % sizeof(float);
  const std::size_t count = std::min<std::size_t>(static_cast<std::size_t>(end - begin), max / sizeof(float));
  look_at(begin, count);
  return std::as_bytes(std::span(begin, count));
}

void CompressedAllReduce::encode(const Segment& segment, std::byte* code) {
  const CodingTime timed(report_.get());
  for (const Tile& tile : plan_->tiles(segment)) {
    const Encoded seen = compress(tile, code + tile.code, host_sum(tile));
    if (seen == Encoded::kNonFinite) explain(tile, code + tile.code);
  }
}

Encoded CompressedAllReduce::compress(const Tile& tile, std::byte* code, const float* values) {
  const CompressedSection& section = sections_[tile.section];
  if (section.residual == nullptr) return codec_.compress(code, values, tile.count);
  return codec_.compress_with_feedback(code, values, section.residual + tile.begin, section.new_residual + tile.begin,
                                       compression_.loss_scale, tile.count);
}

void CompressedAllReduce::flushed(SendFlow& flow) {
  Outgoing& out = out_[stream_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = out.stream->pieces;
  bool freed = false;
  for (; out.sent < pieces.size() && pieces[out.sent].end() <= flow.sent; ++out.sent) {
    if (pieces[out.sent].kind != Kind::kResult) continue;
    State& state = states_[pieces[out.sent].segment];
    if (--state.sends > 0) continue;
    state.result.reset();
    freed = true;
  }
  if (freed) move_on();
}

// ---- Receiving ----

ScratchPool::Block& CompressedAllReduce::room_of(const Piece& piece) {
  State& state = states_[piece.segment];
  if (piece.kind == Kind::kResult) return state.result;
  auto& rooms = piece.kind == Kind::kInput ? state.inputs : state.codes;
  const std::size_t count = piece.kind == Kind::kInput ? hosts_.local().size() : hosts_.members.size();
  while (rooms.size() < count) rooms.emplace_back(nullptr, ScratchPool::Release{});
  return rooms[static_cast<std::size_t>(piece.source)];
}

std::span<std::byte> CompressedAllReduce::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  Incoming& in = in_[stream_of_[static_cast<std::size_t>(flow.member)]];
  const std::vector<Piece>& pieces = in.stream->pieces;
  while (offset >= pieces[in.current].end()) ++in.current;
  const Piece& piece = pieces[in.current];
  if (offset + length > piece.end()) return {};
  ScratchPool::Block& room = room_of(piece);
  if (room == nullptr) room = scratch().take(piece.bytes);
  return {room.get() + (offset - piece.begin), length};
}

void CompressedAllReduce::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  Incoming& in = in_[stream_of_[static_cast<std::size_t>(flow.member)]];
  if (data.empty() || offset + data.size() < in.stream->pieces[in.current].end()) return;
  const Piece& piece = in.stream->pieces[in.current];
  const Segment& segment = plan_->segments()[piece.segment];
  State& state = states_[piece.segment];
  switch (piece.kind) {
    case Kind::kInput:
      if (--state.inputs_missing == 0) add_inputs(segment, state);
      break;
    case Kind::kCode:
      --state.codes_missing;
      break;
    case Kind::kResult: {
      const CodingTime timed(report_.get());
      take_result(segment, state);
      break;
    }
  }
  const bool all_here = state.inputs_missing == 0 && state.codes_missing == 0;
  if (piece.kind != Kind::kResult && all_here && plan_->owns(segment)) take_codes(segment, state);
  move_on();
}

void CompressedAllReduce::add_inputs(const Segment& segment, State& state) {
  const ReduceKernels& kernels = reduce_kernels(DType::kFloat32, ReduceOp::kSum);
  const int ranks = static_cast<int>(hosts_.local().size());
  for (const Tile& tile : plan_->tiles(segment)) {
    look_at(x(tile), tile.count);
    auto values = [&](int place) {
      if (place == hosts_.place) return static_cast<const void*>(x(tile));
      return static_cast<const void*>(state.inputs[static_cast<std::size_t>(place)].get() +
                                      tile.element * sizeof(float));
    };
    const void* left = values(0);
    for (int place = 1; place < ranks; ++place) {
      void* to = place == ranks - 1 ? static_cast<void*>(result(tile)) : sum_.get();
      kernels.combine(to, left, values(place), tile.count);
      left = to;
    }
  }
  state.inputs.clear();
}

void CompressedAllReduce::take_codes(const Segment& segment, State& state) {
  const CodingTime timed(report_.get());
  state.result = scratch().take(segment.code_bytes);
  for (const Tile& tile : plan_->tiles(segment)) {
    std::byte* code = state.result.get() + tile.code;
    if (compress(tile, code, add_codes(tile, state)) == Encoded::kNonFinite) explain(tile, nullptr);
  }
  state.codes.clear();
  take_result(segment, state);
}

// The mean of one tile, in order of the hosts.
const float* CompressedAllReduce::add_codes(const Tile& tile, const State& state) {
  auto* sum = reinterpret_cast<float*>(sum_.get());
  const ReduceKernels& kernels = reduce_kernels(DType::kFloat32, ReduceOp::kAvg);
  auto code = [&](int host) { return state.codes[static_cast<std::size_t>(host)].get() + tile.code; };
  // a + b = b + a: with this rank's part first or second, the other one is decoded into the sum.
  const int first = hosts_.here == 0 ? 1 : 0;
  codec_.decode_set(sum, code(first), tile.count);
  if (hosts_.here <= 1) kernels.combine(sum, host_sum(tile), sum, tile.count);
  for (int host = hosts_.here <= 1 ? 2 : 1; host < hosts_.count(); ++host) {
    if (host == hosts_.here)
      kernels.combine(sum, sum, host_sum(tile), tile.count);
    else
      codec_.decode_add(sum, code(host), tile.count);
  }
  if (compression_.divisor > 1) kernels.divide(sum, compression_.divisor, tile.count);
  return sum;
}

void CompressedAllReduce::take_result(const Segment& segment, State& state) {
  for (const Tile& tile : plan_->tiles(segment)) {
    const std::byte* code = state.result.get() + tile.code;
    codec_.decode_set(result(tile), code, tile.count);
    if (report_ != nullptr && inspect(codec_, code, result(tile), tile.count) == Encoded::kNonFinite)
      report_->finite = false;
  }
  state.done = true;
  if (state.sends == 0) state.result.reset();
}

// ---- Infinities and NaNs ----

void CompressedAllReduce::look_at(const float* values, std::size_t count) {
  watch_.own(std::as_bytes(std::span(values, count)));
}

// If several ranks share the host, x is their sum by now, and was checked before.
void CompressedAllReduce::explain(const Tile& tile, const std::byte* code) {
  if (report_ == nullptr || hosts_.local().size() > 1) return;
  const FirstNonFinite find = first_non_finite(DType::kFloat32);
  std::size_t at = find(x(tile), tile.count);
  if (at == tile.count && code != nullptr) {
    codec_.decode_set(reinterpret_cast<float*>(sum_.get()), code, tile.count);
    at = find(sum_.get(), tile.count);
  }
  if (at == tile.count) return;
  const auto* element = reinterpret_cast<const std::byte*>(x(tile) + at);
  if (report_->own == nullptr || std::less<>()(element, report_->own)) report_->own = element;
}

}  // namespace ringdp

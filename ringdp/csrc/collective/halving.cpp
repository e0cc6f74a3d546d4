#include "collective/halving.h"

#include <algorithm>

#include "collective/all_reduce.h"
#include "collective/host_map.h"

namespace ringdp {
namespace {

constexpr std::size_t kBlockBytes = 128 * 1024;  // of a stream of sums: frames do not cross the end of one
constexpr std::size_t kPieceBytes = 16 * 1024;   // what is added at a time: stays in the first-level cache

// The powers of two below `count`, the largest first.
std::vector<int> distances(int count) {
  std::vector<int> out;
  for (int it = 1; it < count; it *= 2) out.insert(out.begin(), it);
  return out;
}

}  // namespace

Halving::Halving(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory)
    : Operation(std::move(group), shape, std::move(name)),
      memory_(memory),
      element_bytes_(dtype_size(shape.dtype)),
      kernels_(reduce_kernels(shape.dtype, shape.op)) {
  if (kernels_.accumulate != nullptr) wide_ = &reduce_kernels(DType::kFloat32, shape.op);
  uses(memory);
  lay_out();
  // If every block has bytes, every member sends to another one at once, and in each step that it comes to.
  if (Chunks(memory.size(), group_.size, element_bytes_).size(group_.size - 1) == 0) announces_to_neighbours();
}

// Block a·h + b belongs to the rank with place a on host b, of h hosts.
void Halving::lay_out() {
  const HostMap hosts(group_);
  const int m = hosts.most, h = hosts.count(), place = hosts.place, host = hosts.here, own = place * h;
  const Chunks blocks(memory_.size(), group_.size, element_bytes_);
  const auto part = [&](int first, int upto) {
    return memory_.subspan(blocks.begin(first), blocks.begin(upto) - blocks.begin(first));
  };
  inside_.add(part(own, m * h));
  inside_.add(part(0, own));
  between_.add(part(own + host, own + h));
  between_.add(part(own, own + host));
  // The bytes of so many blocks from block `first` on, of those in [from, from + count), which are a ring.
  const auto bytes = [&](int first, int from, int count, int wanted) {
    const int before_end = std::min(wanted, from + count - first);
    return part(first, first + before_end).size() + part(from, from + wanted - before_end).size();
  };
  const auto member_at = [&](int at_place, int at_host) {
    return hosts.members[static_cast<std::size_t>(at_host)][static_cast<std::size_t>(at_place)];
  };
  const auto add_step = [&](const Scattered& order, int ahead, int behind, auto size, int distance, int end) {
    steps_.push_back({.order = &order,
                      .ahead = ahead,
                      .behind = behind,
                      .begin = size(distance),
                      .end = size(end),
                      .kept = size(end - distance)});
  };
  int end = m;
  for (int it : distances(m)) {
    add_step(
        inside_, member_at((place + it) % m, host), member_at((place + m - it) % m, host),
        [&](int places) { return bytes(own, 0, m * h, places * h); }, it, end);
    end = it;
  }
  first_between_ = steps_.size();
  end = h;
  for (int it : distances(h)) {
    add_step(
        between_, member_at(place, (host + it) % h), member_at(place, (host + h - it) % h),
        [&](int of_hosts) { return bytes(own + host, own, h, of_hosts); }, it, end);
    end = it;
  }
  for (Step& step : steps_) {
    if (half() && &step != &steps_.front()) step.scale = 2;
    if (step.end > step.begin) peer(step.ahead).ahead = &step;
    if (step.kept > 0) peer(step.behind).behind = &step;
  }
}

Halving::Peer& Halving::peer(int member) {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& it) { return it.member == member; });
  return found != peers_.end() ? *found : peers_.emplace_back(Peer{.member = member});
}

void Halving::prepare() {
  const Step& first = steps_.front();
  if (half()) sums_ = scratch().take(2 * memory_.size());
  // What the first step neither gives away nor, of wide types, adds to.
  for (std::size_t at = half() ? 0 : first.kept; at < first.begin;) {
    const auto input = first.order->at(at, first.begin - at);
    watch_.own(input);
    if (half()) kernels_.load(sum_of(input), input.data(), input.size() / element_bytes_);
    at += input.size();
  }
  for (Step& step : steps_)
    if (step.kept > 0) step.room = scratch().take(std::min(step.taken(), 2 * kBlockBytes));
  for (Peer& it : peers_) {
    const std::size_t back = it.behind != nullptr ? it.behind->kept : 0;
    const std::size_t results = it.ahead != nullptr ? it.ahead->end - it.ahead->begin : 0;
    it.from = &add_receive(it.member, it.taken() + results, window(it));
    it.to = &add_send(it.member, it.given() + back, 0);
    it.to->lasting = true;  // results overwrite what was given away
  }
  go_on();
}

namespace {

// At most `max` bytes, such that the next ones are aligned again.
std::span<const std::byte> first_of(std::span<const std::byte> next, uint64_t offset, std::size_t max) {
  if (next.size() <= max) return next;
  const std::size_t over = (offset + max) % kGranuleBytes;
  return next.first(over < max ? max - over : max);
}

}  // namespace

// Up to the end of a block of sums, of the part of the memory that is contiguous, or of what the step gives.
std::span<const std::byte> Halving::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  const Peer& to = peer(flow.member);
  const std::size_t given = to.given();
  if (offset >= given) return first_of(to.behind->order->at(offset - given, flow.total - offset), offset, max);
  const Step& step = *to.ahead;
  const std::size_t length = std::min<std::size_t>(given - offset, kBlockBytes - offset % kBlockBytes);
  std::span<const std::byte> next = step.order->at(step.begin + offset / step.scale, length / step.scale);
  if (step.scale == 2) next = std::as_bytes(std::span(sum_of(next), next.size() / element_bytes_));
  next = first_of(next, offset, max);
  if (&step == &steps_.front()) watch_.own(next);
  return next;
}

std::span<std::byte> Halving::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  const Peer& from = peer(flow.member);
  const std::size_t taken = from.taken();
  if (offset >= taken) {
    const auto to = from.ahead->order->at(from.ahead->begin + (offset - taken), length);
    return to.size() == length ? to : std::span<std::byte>{};
  }
  if (offset + length > taken || offset % kBlockBytes + length > kBlockBytes) return {};
  return {from.behind->room.get() + offset % (2 * kBlockBytes), length};
}

void Halving::arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) {
  const Peer& from = peer(flow.member);
  const std::size_t taken = from.taken();
  if (offset < taken) {
    from.behind->come = std::min<uint64_t>(flow.received, taken) / from.behind->scale;
    return advance();
  }
  if (!data.empty()) {
    watch_.result(memory_, offset_of(data), offset_of(data) + data.size());
    from.ahead->results = flow.received - taken;
  }
  go_on();
}

// Sums that are due are added without a copy.
bool Halving::take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
  const Peer& from = peer(flow.member);
  Step* const step = offset < from.taken() ? from.behind : nullptr;
  if (step == nullptr || offset != step->added * step->scale || offset + data.size() > step->taken())
    return Operation::take(flow, offset, data);
  const std::size_t bytes = data.size() / step->scale;
  if (step->added + bytes > due(number(*step))) return Operation::take(flow, offset, data);
  step->come = step->added + bytes;
  add(*step, data.data(), bytes);
  advance();
  return true;
}

std::size_t Halving::due(std::size_t step) const {
  const auto done = [&](std::size_t it) { return steps_[it].added == steps_[it].kept; };
  const std::size_t first = step < first_between_ ? 0 : first_between_;
  while (step > first && done(step - 1)) --step;
  if (step > first) return steps_[step - 1].added;
  if (first > 0 && !done(first - 1)) return 0;
  return first == 0 ? memory_.size() : between_.size();
}

std::size_t Halving::final(std::size_t step) const {
  const bool inside = step < first_between_;
  const std::size_t first = inside ? 0 : first_between_, end = inside ? first_between_ : steps_.size();
  if (inside && end < steps_.size() && final(end) < between_.size()) return 0;
  for (std::size_t i = end; i-- > first;) {
    const Step& it = steps_[i];
    if (i + 1 == steps_.size() && it.added < it.kept) return it.added;
    if (it.results < it.end - it.begin) return it.begin + it.results;
  }
  return steps_[first].end;
}

// What can be added at once needs no room, and two blocks behind it have some. Results are received in place.
uint64_t Halving::window(const Peer& from) const {
  const uint64_t results = from.ahead != nullptr ? from.ahead->end - from.ahead->begin : 0, taken = from.taken();
  if (from.behind == nullptr) return results;
  const std::size_t at_once = due(number(*from.behind)) * from.behind->scale;
  const uint64_t room = (at_once / kBlockBytes + 2) * kBlockBytes;
  return room >= taken ? taken + results : room;
}

void Halving::advance() {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    std::size_t end = std::min(step.come, due(i));
    if (end < step.kept) end -= std::min(end, end % kGranuleBytes);
    while (step.added < end) {
      const std::size_t at = step.added * step.scale;  // in the stream; a block's end is not crossed
      const std::size_t rest = (kBlockBytes - at % kBlockBytes) / step.scale;
      add(step, step.room.get() + at % (2 * kBlockBytes), std::min(end - step.added, rest));
    }
  }
  for (Peer& it : peers_)
    if (const uint64_t now = window(it); now > it.from->window) widen(*it.from, now);
  go_on();
}

// The next bytes of the buffer, from the member behind.
void Halving::add(Step& step, const std::byte* data, std::size_t bytes) {
  const bool first = &step == &steps_.front(), last = &step == &steps_.back();
  const bool mean = last && identity().shape.op == ReduceOp::kAvg;
  const auto divisor = static_cast<std::size_t>(mean ? group_.size : 1);
  for (std::size_t done = 0; done < bytes;) {
    const auto own = step.order->at(step.added, std::min(kPieceBytes, bytes - done));
    const std::size_t count = own.size() / element_bytes_;
    const std::byte* const other = data + done * step.scale;
    if (half()) {
      float* const sum = sum_of(own);
      if (first)
        kernels_.accumulate(sum, other, count);
      else
        wide_->combine(sum, sum, other, count);
      if (last) kernels_.store(own.data(), sum, static_cast<float>(divisor), count);
    } else {
      if (first) watch_.own(own);
      if (mean && kernels_.mean != nullptr) {
        kernels_.mean(own.data(), own.data(), other, divisor, count);
      } else {
        kernels_.combine(own.data(), own.data(), other, count);
        if (mean && kernels_.divide != nullptr) kernels_.divide(own.data(), divisor, count);
      }
    }
    if (last) watch_.result(memory_, offset_of(own), offset_of(own) + own.size());
    step.added += own.size();
    done += own.size();
  }
}

void Halving::go_on() {
  for (Peer& it : peers_) {
    std::size_t ready = 0;
    if (it.ahead != nullptr) {
      const Step& step = *it.ahead;
      ready = (std::clamp(due(number(step)), step.begin, step.end) - step.begin) * step.scale;
    }
    if (ready == it.given() && it.behind != nullptr) ready += std::min(final(number(*it.behind)), it.behind->kept);
    it.to->ready = ready;
  }
}

const AllReduceAlgorithm kHalvingAllReduce{
    Algorithm::kHalving,
    [](const AllReduceRequest& request) {
      return !request.rank_order && fits_halving(request.table, request.hosts, request.dtype, request.bytes);
    },
    [](const GroupView& group, const OperationShape& shape, std::string name, std::span<std::byte> memory)
        -> std::unique_ptr<Operation> { return std::make_unique<Halving>(group, shape, std::move(name), memory); }};

}  // namespace ringdp

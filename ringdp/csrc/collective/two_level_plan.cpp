#include "collective/two_level_plan.h"

#include <algorithm>

namespace ringdp {
namespace {

// Part of the order of summation (docs/reference/algorithms.md): how the buffer is cut.
constexpr std::size_t kBlockBytes = RankOrderFold::kBlockBytes;  // longest
constexpr std::size_t kLeastBlockBytes = 16 * 1024;              // shorter only so that every rank gets a share
constexpr int kLeastRounds = 4;  // shares of each carrier: the work inside overlaps the wire

// The pipeline's depth, in rounds of a share for every carrier; the bits do not depend on it. Inputs are sent inside a
// host so many rounds before they are needed between hosts, and between hosts a share waits for its next step while so
// many others take theirs, so that the line is busy while a block is in flight. Between far hosts all shares take a
// step before the first of them takes the next.
constexpr int kLead = 4;
constexpr int kLag = 4;

int count_shares(std::size_t bytes, int hosts, int most) {
  auto h = static_cast<std::size_t>(hosts), k = static_cast<std::size_t>(most);
  std::size_t needed = (bytes + h * kBlockBytes - 1) / (h * kBlockBytes);
  std::size_t wanted = std::min(kLeastRounds * k, bytes / (h * kLeastBlockBytes));
  std::size_t count = std::max<std::size_t>({needed, wanted, 1});
  return static_cast<int>((count + k - 1) / k * k);
}

}  // namespace

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
      in_pairs_(half_ || far),
      ranks_(op == ReduceOp::kAvg ? hosts.ranks : 1),
      share_count_(count_shares(memory.size(), hosts.count(), hosts.most)),
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
  Chunks blocks(whole.size(), hosts_.count(), element_bytes_);
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

}  // namespace ringdp

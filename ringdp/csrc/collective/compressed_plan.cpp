#include "collective/compressed_plan.h"

#include <algorithm>
#include <numeric>

#include "collective/algorithm_table.h"

namespace ringdp {
namespace {

constexpr std::size_t kShortestSegment = 4 * 1024;
// Long segments cost fewer frames, short ones let the steps of a small buffer overlap.
constexpr std::size_t kLeastSegments = 8;  // of a part, if it is long enough

// The pipeline's depth in turns; the bits do not depend on it. Inside a host inputs are sent so many turns before
// their sum leaves it, and results follow codes at that distance, so that the line is busy while a segment is in
// flight. Between far hosts all codes are sent before the first result.
constexpr std::size_t kLead = 2;
constexpr std::size_t kLag = 4;

std::size_t units_of(std::size_t count) { return (count + CompressedPlan::kUnit - 1) / CompressedPlan::kUnit; }

}  // namespace

GroupView code_hosts(GroupView group) {
  if (group.rank_order || layout_of(group.hosts) != Layout::kSeveralRanksPerHost)
    std::iota(group.hosts.begin(), group.hosts.end(), 0);
  if (group.rank_order) group.weights.clear();
  return group;
}

// Part p of P has U/P of the U units, and one more where (p - owner_offset) mod P < U mod P: owner_offset gives the
// remainder of different sections to different ranks.
std::vector<std::size_t> part_bounds(std::size_t count, int parts, uint32_t owner_offset) {
  const auto p = static_cast<std::size_t>(parts);
  const std::size_t units = units_of(count);
  std::vector<std::size_t> bounds{0};
  for (std::size_t part = 0; part < p; ++part) {
    const bool more = (part + p - owner_offset % p) % p < units % p;
    bounds.push_back(std::min(bounds.back() + (units / p + (more ? 1 : 0)) * CompressedPlan::kUnit, count));
  }
  return bounds;
}

// The host's weight for each of its shares' parts.
std::vector<std::size_t> owner_bounds(std::size_t count, const HostMap& hosts, uint32_t owner_offset) {
  if (hosts.weights.empty()) return part_bounds(count, hosts.most * hosts.count(), owner_offset);
  Weights weights;
  for (int share = 0; share < hosts.most; ++share)
    weights.insert(weights.end(), hosts.weights.begin(), hosts.weights.end());
  std::vector<std::size_t> bounds = weighted_bounds(units_of(count), weights, owner_offset);
  for (std::size_t& bound : bounds) bound = std::min(bound * CompressedPlan::kUnit, count);
  return bounds;
}

std::vector<std::pair<std::size_t, std::size_t>> owned_elements(const GroupView& group, std::size_t count,
                                                                uint32_t owner_offset) {
  const HostMap hosts(code_hosts(group));
  const std::vector<std::size_t> bounds = owner_bounds(count, hosts, owner_offset);
  std::vector<std::pair<std::size_t, std::size_t>> out;
  for (int share = 0; share < hosts.most; ++share) {
    const auto part = static_cast<std::size_t>(share * hosts.count() + hosts.here);
    if (hosts.carrier(hosts.here, share) == group.rank && bounds[part] < bounds[part + 1])
      out.emplace_back(bounds[part], bounds[part + 1]);
  }
  return out;
}

CompressedPlan::CompressedPlan(const HostMap& hosts, std::span<const CompressedSection> sections, const Codec& codec,
                               bool far)
    : hosts_(hosts),
      rank_(hosts.local()[static_cast<std::size_t>(hosts.place)]),
      parts_(hosts.most * hosts.count()),
      of_part_(static_cast<std::size_t>(parts_)) {
  std::size_t units = 0;
  for (const CompressedSection& section : sections) units += units_of(section.count);
  const std::size_t share = units * kUnit / static_cast<std::size_t>(parts_) / kLeastSegments;
  const std::size_t limit = std::clamp(share - share % kUnit, kShortestSegment, kLongestSegment);
  const std::vector<std::vector<Run>> parts = cut(sections);
  for (int part = 0; part < parts_; ++part) make_segments(part, parts[static_cast<std::size_t>(part)], limit, codec);
  make_streams(far);
}

std::vector<std::vector<CompressedPlan::Run>> CompressedPlan::cut(std::span<const CompressedSection> sections) const {
  std::vector<std::vector<Run>> out(static_cast<std::size_t>(parts_));
  for (std::size_t i = 0; i < sections.size(); ++i) {
    const std::vector<std::size_t> bounds = owner_bounds(sections[i].count, hosts_, sections[i].owner_offset);
    for (std::size_t part = 0; part + 1 < bounds.size(); ++part)
      if (bounds[part] < bounds[part + 1]) out[part].push_back({i, bounds[part], bounds[part + 1]});
  }
  return out;
}

void CompressedPlan::make_segments(int part, const std::vector<Run>& runs, std::size_t limit, const Codec& codec) {
  bool open = false;
  for (Run run : runs) {
    while (run.begin < run.end) {
      const std::size_t used = open ? segments_.back().elements : 0;
      const std::size_t room = (limit - used) / kUnit * kUnit;
      if (open && room == 0) {
        open = false;
        continue;
      }
      if (!open) {
        of_part_[static_cast<std::size_t>(part)].push_back(segments_.size());
        segments_.push_back(
            {.share = part / hosts_.count(), .owner = part % hosts_.count(), .first_tile = tiles_.size()});
        open = true;
      }
      Segment& segment = segments_.back();
      const std::size_t count = std::min({run.end - run.begin, room, kTileElements});
      tiles_.push_back({run.section, run.begin, count, segment.elements, segment.code_bytes});
      ++segment.tile_count;
      segment.elements += count;
      segment.code_bytes += codec.encoded_bytes(count);
      run.begin += count;
    }
  }
}

std::size_t CompressedPlan::longest_code() const {
  std::size_t longest = 0;
  for (const Segment& segment : segments_) longest = std::max(longest, segment.code_bytes);
  return longest;
}

void CompressedPlan::make_streams(bool far) {
  const std::vector<int>& local = hosts_.local();
  for (int step = 1; step < hosts_.ranks; ++step) {
    const int member = (rank_ + step) % hosts_.ranks;
    bool meets = false;
    for (int share = 0; share < hosts_.most; ++share) {
      const int mine = carrier(hosts_.here, share);
      if (std::find(local.begin(), local.end(), member) != local.end()) {
        meets = meets || mine == rank_ || mine == member;
        continue;
      }
      for (int host = 0; host < hosts_.count(); ++host)
        meets = meets || (mine == rank_ && host != hosts_.here && carrier(host, share) == member);
    }
    if (!meets) continue;
    out_.emplace_back().member = member;
    in_.emplace_back().member = member;
  }
  // Each host begins with the parts of the next one, so that not all hosts send to the same one at once. A stream
  // inside a host has the same order at both ends, and one between hosts is of parts of one host.
  std::vector<int> order;
  for (int share = 0; share < hosts_.most; ++share)
    for (int i = 1; i <= hosts_.count(); ++i)
      order.push_back(share * hosts_.count() + (hosts_.here + i) % hosts_.count());
  std::size_t rounds = 0;
  for (const auto& part : of_part_) rounds = std::max(rounds, part.size());
  const std::size_t lead = hosts_.most > 1 ? kLead : 0, lag = far ? std::max(rounds, kLag) : kLag;
  for (std::size_t turn = 0; turn < rounds + lead + lag + 1; ++turn) {
    auto for_round = [&](std::size_t delay, auto add_pieces) {
      if (turn < delay) return;
      for (const int part : order) {
        const auto& segments = of_part_[static_cast<std::size_t>(part)];
        if (turn - delay < segments.size()) (this->*add_pieces)(segments[turn - delay]);
      }
    };
    for_round(0, &CompressedPlan::add_inputs);
    for_round(lead, &CompressedPlan::add_codes);
    for_round(lead + lag, &CompressedPlan::add_results);
    for_round(lead + lag + 1, &CompressedPlan::add_results_inside);
  }
}

void CompressedPlan::add_inputs(std::size_t segment) {
  const std::vector<int>& local = hosts_.local();
  if (!carries(segments_[segment]))
    return add(out_, carrier(hosts_.here, segments_[segment].share), segment, Kind::kInput);
  for (int place = 0; place < static_cast<int>(local.size()); ++place)
    if (place != hosts_.place) add(in_, local[static_cast<std::size_t>(place)], segment, Kind::kInput, place);
}

void CompressedPlan::add_codes(std::size_t segment) {
  const Segment& it = segments_[segment];
  if (!carries(it)) return;
  if (!owns(it)) return add(out_, carrier(it.owner, it.share), segment, Kind::kCode);
  for (int host = 0; host < hosts_.count(); ++host)
    if (host != hosts_.here) add(in_, carrier(host, it.share), segment, Kind::kCode, host);
}

void CompressedPlan::add_results(std::size_t segment) {
  const Segment& it = segments_[segment];
  if (!carries(it)) return;
  if (!owns(it)) return add(in_, carrier(it.owner, it.share), segment, Kind::kResult);
  for (int host = 0; host < hosts_.count(); ++host)
    if (host != hosts_.here) add(out_, carrier(host, it.share), segment, Kind::kResult);
}

void CompressedPlan::add_results_inside(std::size_t segment) {
  const Segment& it = segments_[segment];
  if (!carries(it)) return add(in_, carrier(hosts_.here, it.share), segment, Kind::kResult);
  for (int member : hosts_.local())
    if (member != rank_) add(out_, member, segment, Kind::kResult);
}

void CompressedPlan::add(std::vector<Stream>& streams, int member, std::size_t segment, Kind kind, int source) {
  auto stream = std::find_if(streams.begin(), streams.end(), [&](const Stream& it) { return it.member == member; });
  const Segment& it = segments_[segment];
  const uint64_t bytes = kind == Kind::kInput ? it.input_bytes() : it.code_bytes;
  stream->pieces.push_back({kind, segment, stream->total(), bytes, source});
}

}  // namespace ringdp

// CompressedPlan: the messages of a compressed all-reduce, made from the host map, the sections and the codec. Every
// rank derives the same one.
//
// h hosts, of which the fullest has k ranks: each section is cut into k·h parts, in whole units. Part s·h + H, of the
// host's weight where hosts have weights, belongs to host H and to share s, which is carried on every host by that
// host's rank number s modulo its number of ranks. Of all sections' parts of one number, laid end to end, segments are
// made. Four things happen to a segment:
//   input   the ranks of a host send their x to the host's carrier, which adds them up in rank order (nothing to do
//           where a host has one rank);
//   code    the carriers send the code of that sum to the carrier on the owner's host, which decodes and adds in the
//           order of the hosts, its own sum as it is, divides, and encodes the mean;
//   result  that code goes to all other carriers, and from them to the other ranks of their hosts.
// All pieces have one order, by `turn`, in which later segments begin while earlier ones are in flight. A turn needs
// results of earlier turns only, and every stream is in that order, so the oldest missing piece can always move: no
// deadlock. Owned by one operation, whose thread uses it; immutable once made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "collective/compressed.h"
#include "collective/host_map.h"

namespace ringdp {

// The hosts that exchange codes: the group's own if there are several hosts and one has several ranks; otherwise, and
// in rank order, each rank counts as a host. In rank order all own alike.
GroupView code_hosts(GroupView group);

// Where the parts of a section begin, and at the end `count`: equal ones, and those of the hosts by their weights.
std::vector<std::size_t> part_bounds(std::size_t count, int parts, uint32_t owner_offset);
std::vector<std::size_t> owner_bounds(std::size_t count, const HostMap& hosts, uint32_t owner_offset);

// [begin, end) of those elements of a section whose mean this rank computes.
std::vector<std::pair<std::size_t, std::size_t>> owned_elements(const GroupView& group, std::size_t count,
                                                                uint32_t owner_offset);

class CompressedPlan {
 public:
  // Adjoining elements of one section that are coded together: they stay in the first-level cache from step to step.
  struct Tile {
    std::size_t section;
    std::size_t begin;  // in the section; a multiple of kUnit
    std::size_t count;
    std::size_t element;  // where in the segment it begins
    std::size_t code;     // where its code begins in the segment's

    std::size_t end() const { return begin + count; }
  };

  struct Segment {
    int share = 0;
    int owner = 0;  // host
    std::size_t first_tile = 0;
    std::size_t tile_count = 0;
    std::size_t elements = 0;
    std::size_t code_bytes = 0;

    std::size_t input_bytes() const { return elements * sizeof(float); }
  };

  enum class Kind : uint8_t { kInput, kCode, kResult };

  struct Piece {
    Kind kind;
    std::size_t segment;
    uint64_t begin;  // place in the stream
    uint64_t bytes;
    int source = 0;  // received: the place in its host of the rank whose input it is; the host whose code it is

    uint64_t end() const { return begin + bytes; }
  };

  struct Stream {
    int member = 0;
    std::vector<Piece> pieces;

    uint64_t total() const { return pieces.empty() ? 0 : pieces.back().end(); }
  };

  // Elements whose codes do not depend on where the section is cut: every codec's block divides it.
  static constexpr std::size_t kUnit = 256;
  static constexpr std::size_t kTileElements = 8 * 1024;
  static constexpr std::size_t kLongestSegment = 63 * 1024;  // an int8 code of it has 64 KiB

  // `far` as in GroupView.
  CompressedPlan(const HostMap& hosts, std::span<const CompressedSection> sections, const Codec& codec,
                 bool far = false);

  const std::vector<Segment>& segments() const { return segments_; }
  std::size_t longest_code() const;  // of a segment, in bytes
  std::span<const Tile> tiles(const Segment& segment) const {
    return std::span(tiles_).subspan(segment.first_tile, segment.tile_count);
  }
  // Flows to and from every member with which this rank may exchange codes, even if these sections have none, so that
  // each receives the other's description.
  const std::vector<Stream>& outgoing() const { return out_; }
  const std::vector<Stream>& incoming() const { return in_; }

  bool carries(const Segment& segment) const { return carrier(hosts_.here, segment.share) == rank_; }
  bool owns(const Segment& segment) const { return segment.owner == hosts_.here && carries(segment); }

 private:
  struct Run {
    std::size_t section, begin, end;
  };

  // [part]: its run of each section
  std::vector<std::vector<Run>> cut(std::span<const CompressedSection> sections) const;
  void make_segments(int part, const std::vector<Run>& runs, std::size_t limit, const Codec& codec);
  void make_streams(bool far);
  void add_inputs(std::size_t segment);
  void add_codes(std::size_t segment);
  void add_results(std::size_t segment);
  void add_results_inside(std::size_t segment);

  int carrier(int host, int share) const { return hosts_.carrier(host, share); }
  void add(std::vector<Stream>& streams, int member, std::size_t segment, Kind kind, int source = 0);

  const HostMap& hosts_;
  const int rank_;
  const int parts_;
  std::vector<Tile> tiles_;
  std::vector<Segment> segments_;
  std::vector<std::vector<std::size_t>> of_part_;  // [part]: its segments
  std::vector<Stream> out_;
  std::vector<Stream> in_;
};

}  // namespace ringdp

#include "collective/stages.h"

#include <algorithm>

namespace ringdp {

Stage& StagePlan::add_sum(std::span<std::byte> memory, int parts, int place, int divisor, Stage* own) {
  Stage& sum = add_stage(Stage::Kind::kSum, memory);
  sum.parts = parts;
  sum.place = place;
  sum.divisor = divisor;
  sum.input = memory;
  sum.own = own;
  if (own != nullptr) own->next = &sum;
  return sum;
}

void StagePlan::add_piece(std::vector<Stream>& streams, int member, Stage& stage, int part) {
  auto found = std::find_if(streams.begin(), streams.end(), [&](const Stream& it) { return it.member == member; });
  Stream& stream = found != streams.end() ? *found : streams.emplace_back(Stream{member, {}, 0});
  stream.pieces.push_back({&stage, stream.total, part});
  stream.total += stage.size;
}

}  // namespace ringdp

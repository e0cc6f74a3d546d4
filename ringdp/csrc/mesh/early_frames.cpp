#include "mesh/early_frames.h"

#include <algorithm>

namespace ringdp {

bool EarlyFrames::keep(const FrameHeader& header, std::vector<std::byte> payload) {
  auto& frames = kept_[{header.group, header.sequence}].frames;
  const bool again = std::any_of(frames.begin(), frames.end(), [](const Frame& it) { return it.payload.empty(); });
  if (payload.empty() && again) return false;
  bytes_ += payload.size();
  frames.push_back({header, std::move(payload)});
  return true;
}

bool EarlyFrames::request(uint64_t group, uint64_t sequence) {
  if (full()) return false;
  kept_[{group, sequence}].requested = true;
  return true;
}

std::optional<EarlyFrames::Kept> EarlyFrames::take(uint64_t group, uint64_t sequence) {
  auto found = kept_.extract({group, sequence});
  if (!found) return std::nullopt;
  for (const Frame& frame : found.mapped().frames) bytes_ -= frame.payload.size();
  return std::move(found.mapped());
}

std::vector<FrameHeader> EarlyFrames::discard(uint64_t group) {
  std::vector<FrameHeader> gone;
  std::erase_if(kept_, [&](const auto& entry) {
    if (entry.first.first != group) return false;
    for (const Frame& frame : entry.second.frames) {
      bytes_ -= frame.payload.size();
      gone.push_back(frame.header);
    }
    return true;
  });
  return gone;
}

}  // namespace ringdp

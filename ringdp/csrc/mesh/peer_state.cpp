#include "mesh/peer_state.h"

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/error.h"
#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kFixedBytes = 40;
constexpr std::size_t kMaxWaits = 64;
constexpr std::size_t kTextBytes = 560;  // of each text
constexpr std::size_t kMaxMissing = 4;
constexpr std::size_t kWhyBytes = 200;
constexpr std::size_t kMissingBytes = 8 + kWhyBytes;
static_assert(kFixedBytes + kMaxWaits * 4 + 3 * kTextBytes + kMaxMissing * kMissingBytes <= kPeerStateBytes);

}  // namespace

std::string PeerState::encode() const {
  const std::array texts{clean_text(name, kTextBytes), clean_text(last, kTextBytes), clean_text(elsewhere, kTextBytes)};
  std::size_t waits = std::min(waits_for.size(), kMaxWaits);
  std::array<std::byte, kFixedBytes> fixed{};
  put(&fixed[0], static_cast<uint8_t>(progress));
  put(&fixed[1], static_cast<uint8_t>(waits));
  for (std::size_t i = 0; i < texts.size(); ++i) put(&fixed[2 + 2 * i], static_cast<uint16_t>(texts[i].size()));
  put(&fixed[8], since_call_ms);
  put(&fixed[16], blocked_group);
  put(&fixed[24], blocked_sequence);
  put(&fixed[32], static_cast<uint8_t>(needs_asker));
  std::string out(reinterpret_cast<const char*>(fixed.data()), fixed.size());
  for (std::size_t i = 0; i < waits; ++i) {
    std::array<std::byte, 4> rank;
    put(rank.data(), static_cast<int32_t>(waits_for[i]));
    out.append(reinterpret_cast<const char*>(rank.data()), rank.size());
  }
  for (const std::string& text : texts) out += text;
  for (std::size_t i = 0; i < std::min(missing.size(), kMaxMissing); ++i) {
    const std::string why = clean_text(missing[i].why, kWhyBytes);
    std::array<std::byte, 8> head{};
    put(&head[0], static_cast<int32_t>(missing[i].rank));
    put(&head[4], static_cast<uint8_t>(std::clamp(missing[i].hops, 0, 255)));
    put(&head[5], static_cast<uint8_t>(why.size()));
    out.append(reinterpret_cast<const char*>(head.data()), head.size());
    out += why;
  }
  return out;
}

PeerState PeerState::decode(std::span<const std::byte> raw) {
  auto take_bytes = [&](std::size_t count) {
    if (raw.size() < count) throw Error(ErrorKind::kHandshake, "received a pong that is too short");
    auto piece = raw.first(count);
    raw = raw.subspan(count);
    return piece;
  };
  auto fixed = take_bytes(kFixedBytes);
  PeerState state;
  state.progress = static_cast<Progress>(std::min<uint8_t>(take<uint8_t>(&fixed[0]), 5));
  state.since_call_ms = take<int64_t>(&fixed[8]);
  state.blocked_group = take<uint64_t>(&fixed[16]);
  state.blocked_sequence = take<uint64_t>(&fixed[24]);
  state.needs_asker = take<uint8_t>(&fixed[32]) != 0;
  for (std::size_t i = 0; i < take<uint8_t>(&fixed[1]); ++i)
    state.waits_for.push_back(take<int32_t>(take_bytes(4).data()));
  std::size_t at = 2;
  for (std::string* text : {&state.name, &state.last, &state.elsewhere}) {
    *text = clean_text(text_of(take_bytes(take<uint16_t>(&fixed[at]))), kTextBytes);
    at += 2;
  }
  while (!raw.empty()) {
    auto head = take_bytes(8);
    MissingRank it{.rank = take<int32_t>(&head[0]), .hops = take<uint8_t>(&head[4]), .why = {}};
    it.why = clean_text(text_of(take_bytes(take<uint8_t>(&head[5]))), kWhyBytes);
    if (state.missing.size() < kMaxMissing) state.missing.push_back(std::move(it));
  }
  return state;
}

}  // namespace ringdp

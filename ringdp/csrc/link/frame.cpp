#include "link/frame.h"

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/error.h"
#include "base/process_stacks.h"
#include "base/text.h"
#include "base/types.h"

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

namespace {

constexpr uint16_t kMagic = 0x4452;  // "RD"
constexpr std::size_t kAbortFixedBytes = 20;

// Part of the wire format: append, never renumber.
constexpr std::array<std::string_view, 6> kForeignBackends{"another backend", "nccl", "gloo", "ucc", "mpi", "xccl"};

std::size_t longest_payload(FrameType type) {
  switch (type) {
    case FrameType::kData:
      return kSegmentBytes;
    case FrameType::kAbort:
      return kAbortFixedBytes + kAbortTextBytes;
    case FrameType::kBye:
      return kReasonBytes;
    case FrameType::kPong:
      return std::max(kPeerStateBytes, kStacksBytes);
    default:
      return 0;
  }
}

bool is_type(uint8_t type) { return type >= 1 && type <= 8; }

}  // namespace

int32_t foreign_backend_number(std::string_view name) {
  const auto* found = std::find(kForeignBackends.begin(), kForeignBackends.end(), name);
  return found == kForeignBackends.end() ? 0 : static_cast<int32_t>(found - kForeignBackends.begin());
}

uint64_t OperationShape::fingerprint() const {
  std::array<std::byte, 28> raw{};
  raw[0] = static_cast<std::byte>(what);
  raw[1] = static_cast<std::byte>(dtype);
  raw[2] = static_cast<std::byte>(op);
  raw[3] = static_cast<std::byte>(algorithm);
  put(&raw[4], root);
  put(&raw[8], count);
  put(&raw[16], name_hash);
  put(&raw[20], layout_hash);
  return hash_bytes(raw);
}

std::string OperationShape::text() const {
  std::string out(collective_name(what));
  if (what == Collective::kBarrier) return out;
  out += "(" + std::string(dtype_name(dtype)) + "[" + std::to_string(count) + "]";
  if (what == Collective::kAllReduce || what == Collective::kReduceScatter || what == Collective::kReduce)
    out += ", " + std::string(reduce_op_name(op));
  if (algorithm == kElsewhere) {
    const auto by = static_cast<std::size_t>(root);
    return out + ") by " + std::string(kForeignBackends[by < kForeignBackends.size() ? by : 0]);
  }
  if (what == Collective::kSend || what == Collective::kRecv)
    out += ", tag " + std::to_string(root);
  else if (root >= 0 && what == Collective::kAllReduce)
    out += ", " + codec_text(root);
  else if (root >= 0)
    out += ", root " + std::to_string(root);
  return out + ")";
}

FrameHeader FrameHeader::of(FrameType type, uint64_t group, uint64_t sequence, uint64_t offset) {
  FrameHeader header;
  header.type = type;
  header.group = group;
  header.sequence = sequence;
  header.offset = offset;
  return header;
}

void FrameHeader::encode(std::span<std::byte, kFrameHeaderBytes> out) const {
  std::byte* at = out.data();
  put(at, kMagic);
  put(at + 2, static_cast<uint8_t>(type));
  put(at + 3, static_cast<uint8_t>(eager ? 1 : 0));
  put(at + 4, length);
  put(at + 8, group);
  put(at + 16, sequence);
  put(at + 24, offset);
  put(at + 32, fingerprint);
  put(at + 40, static_cast<uint8_t>(shape.what));
  put(at + 41, static_cast<uint8_t>(shape.dtype));
  put(at + 42, static_cast<uint8_t>(shape.op));
  put(at + 43, shape.algorithm);
  put(at + 44, shape.root);
  put(at + 48, shape.count);
  put(at + 56, shape.name_hash);
  put(at + 60, credit);
}

FrameHeader FrameHeader::decode(std::span<const std::byte, kFrameHeaderBytes> raw) {
  const std::byte* at = raw.data();
  FrameHeader header;
  auto type = take<uint8_t>(at + 2);
  header.length = take<uint32_t>(at + 4);
  if (take<uint16_t>(at) != kMagic || !is_type(type) || header.length > longest_payload(static_cast<FrameType>(type)))
    throw Error(ErrorKind::kHandshake, "received bytes that are not a frame of ringdp's protocol");
  header.type = static_cast<FrameType>(type);
  header.eager = (take<uint8_t>(at + 3) & 1) != 0;
  header.group = take<uint64_t>(at + 8);
  header.sequence = take<uint64_t>(at + 16);
  header.offset = take<uint64_t>(at + 24);
  header.fingerprint = take<uint64_t>(at + 32);
  header.shape.what = static_cast<Collective>(take<uint8_t>(at + 40));
  header.shape.dtype = static_cast<DType>(take<uint8_t>(at + 41));
  header.shape.op = static_cast<ReduceOp>(take<uint8_t>(at + 42));
  header.shape.algorithm = take<uint8_t>(at + 43);
  header.shape.root = take<int32_t>(at + 44);
  header.shape.count = take<uint64_t>(at + 48);
  header.shape.name_hash = take<uint32_t>(at + 56);
  header.credit = take<uint32_t>(at + 60);
  return header;
}

std::string AbortNotice::encode() const {
  std::array<std::byte, kAbortFixedBytes> fixed{};
  fixed[0] = static_cast<std::byte>(kind);
  fixed[1] = static_cast<std::byte>(unexplained ? 1 : 0);
  put(&fixed[4], guilty_rank);
  put(&fixed[8], sequence);
  put(&fixed[16], found_by);
  std::string out(reinterpret_cast<const char*>(fixed.data()), fixed.size());
  return out + clean_text(text, kAbortTextBytes);
}

AbortNotice AbortNotice::decode(std::span<const std::byte> raw) {
  AbortNotice notice;
  if (raw.size() < kAbortFixedBytes) throw Error(ErrorKind::kHandshake, "received an abort notice that is too short");
  auto kind = static_cast<uint8_t>(raw[0]);
  const bool known =
      kind <= static_cast<uint8_t>(ErrorKind::kSystem) || kind == static_cast<uint8_t>(ErrorKind::kDamaged);
  notice.kind = known ? static_cast<ErrorKind>(kind) : ErrorKind::kPeerLost;
  notice.unexplained = raw[1] != std::byte{0};
  notice.guilty_rank = take<int32_t>(raw.data() + 4);
  notice.sequence = take<uint64_t>(raw.data() + 8);
  notice.found_by = take<int32_t>(raw.data() + 16);
  notice.text = clean_text(text_of(raw.subspan(kAbortFixedBytes)), kAbortTextBytes);
  return notice;
}

namespace {

constexpr std::size_t kPayloadAt = kFrameHeaderBytes,
                      kHeadAt = kPayloadAt + 4;  // the first of the payload, the second of all before it

}  // namespace

void FrameCheck::write_head(const FrameHeader& header, std::span<const std::byte> payload, std::byte* out) const {
  header.encode(std::span<std::byte, kFrameHeaderBytes>(out, kFrameHeaderBytes));
  if (!on_) return;
  put(out + kPayloadAt, crc32c(payload));
  put(out + kHeadAt, crc32c({out, kHeadAt}));
}

bool FrameCheck::accept_head(const std::byte* head) {
  if (!on_) return true;
  sent_ = take<uint32_t>(head + kPayloadAt);
  found_ = 0;
  return take<uint32_t>(head + kHeadAt) == crc32c({head, kHeadAt});
}

}  // namespace ringdp

// How far the flows to one peer may go: eagerly while the peer's window has room, beyond that as far as was granted.
#include <algorithm>
#include <cstdint>

#include "link/incoming_flows.h"
#include "link/link_sender.h"
#include "testing.h"

namespace ringdp {
namespace {

FlowIdentity identity_of(uint64_t group, uint64_t sequence) {
  FlowIdentity identity;
  identity.group = group;
  identity.sequence = sequence;
  return identity;
}

SendFlow flow_of(const FlowIdentity& identity, uint64_t total) {
  SendFlow flow;
  flow.identity = &identity;
  flow.total = flow.ready = total;
  return flow;
}

FrameHeader grant_for(const FlowIdentity& identity, uint64_t offset) {
  FrameHeader header;
  header.group = identity.group;
  header.sequence = identity.sequence;
  header.offset = offset;
  return header;
}

CASE("without a grant a flow goes its first bytes, and no further") {
  const FlowIdentity identity = identity_of(1, 1);
  SendWindow window;
  SendFlow small = flow_of(identity, 1000);
  CHECK_EQ(window.allowance(small), 1000u);
  small.ready = 0;
  CHECK(!window.sendable(small));
  SendFlow large = flow_of(identity, 10 * kSmallFlowBytes);
  CHECK_EQ(window.allowance(large), kSmallFlowBytes);
  large.sent = kSmallFlowBytes;
  CHECK(!window.sendable(large));
  CHECK(!window.must_request(large));  // its grant comes unasked
  large.granted = 3 * kSmallFlowBytes;
  CHECK_EQ(window.allowance(large), 2 * kSmallFlowBytes);
  SendFlow far = flow_of(identity, 10 * kSmallFlowBytes);
  far.eager = 4 * kSmallFlowBytes;
  CHECK_EQ(window.allowance(far), 4 * kSmallFlowBytes);
  far.sent = far.eager;
  CHECK(!window.sendable(far));
  CHECK(!window.must_request(far));
}

CASE("what is eager never exceeds the peer's window, and credits open it again, also past 2^32 bytes") {
  const FlowIdentity identity = identity_of(1, 1);
  SendWindow window;
  uint64_t sent = 0, credited = 0;
  for (int step = 0; step < 200'000; ++step) {
    SendFlow flow = flow_of(identity, kSmallFlowBytes);
    while (const std::size_t allowed = flow.sent < flow.total ? window.allowance(flow) : 0) {
      flow.sent += allowed;
      sent += allowed;
      window.sent_eagerly(allowed);
    }
    if (sent - credited > kEagerWindowBytes) CHECK_EQ(sent - credited, kEagerWindowBytes);
    if (flow.sent == flow.total) continue;
    if (flow.sent == 0) CHECK(window.must_request(flow));
    flow.requested = true;
    CHECK(!window.sendable(flow));  // it waits for its grant, so none comes too late
    credited += std::min<uint64_t>(sent - credited, 300'007);
    window.credited(static_cast<uint32_t>(credited));
  }
  CHECK(sent > (uint64_t{1} << 32));
}

CASE("a grant that came before its operation is taken once, and never exceeds the flow") {
  const FlowIdentity first = identity_of(7, 1), second = identity_of(7, 2), other = identity_of(8, 1);
  SendWindow window;
  CHECK(window.keep_grant(grant_for(first, 500)));
  CHECK(window.keep_grant(grant_for(first, 300)));  // an older one changes nothing
  CHECK(window.keep_grant(grant_for(second, 100)));
  CHECK(window.keep_grant(grant_for(other, 100)));
  SendFlow flow = flow_of(first, 400);
  window.take_grant(flow);
  CHECK_EQ(flow.granted, 400u);
  SendFlow again = flow_of(first, 400);
  window.take_grant(again);
  CHECK_EQ(again.granted, 0u);
  window.discard_group(7);
  SendFlow dropped = flow_of(second, 400), kept = flow_of(other, 400);
  window.take_grant(dropped);
  window.take_grant(kept);
  CHECK_EQ(dropped.granted, 0u);
  CHECK_EQ(kept.granted, 100u);
}

CASE("a peer cannot make this rank keep grants without bound") {
  SendWindow window;
  std::size_t kept = 0;
  while (kept <= kMaxEarlyOperations && window.keep_grant(grant_for(identity_of(1, kept), 1))) ++kept;
  CHECK_EQ(kept, kMaxEarlyOperations);
}

}  // namespace
}  // namespace ringdp

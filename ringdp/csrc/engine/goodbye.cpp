#include "engine/goodbye.h"

#include <algorithm>
#include <thread>

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kUnread{400};  // an idle engine looks at its links four times a second
constexpr milliseconds kUnsent{1000};

milliseconds patience_with(Link& link, int64_t heal_ms) {
  if (link.healing()) return milliseconds(heal_ms);
  return link.has_outgoing() || !link.drained() ? kUnsent : link.repair().possible() ? kUnread : milliseconds(0);
}

}  // namespace

void say_goodbye(PeerLinks& links, const std::string& reason) {
  for (auto& link : links.all())
    if (link) link->send_bye(reason);  // a rank without a connection sees that nothing listens here
  links.send_all();
}

bool parted(const PeerLinks& links, Clock::time_point since, int64_t heal_ms) {
  const auto waited = Clock::now() - since;
  const auto all = links.all();
  return std::all_of(all.begin(), all.end(), [&](auto& link) {
    if (!link || !link->usable() || (!link->connected() && !link->healing())) return true;
    return waited >= patience_with(*link, heal_ms);
  });
}

void end_connections(PeerLinks& links, Deadline deadline) {
  // A peer that does not read must not keep this rank from leaving.
  while (links.anything_outgoing() && !deadline.expired())
    if (!links.send_all()) std::this_thread::sleep_for(milliseconds(1));
  for (auto& link : links.all()) {
    if (!link || !link->connected()) continue;
    links.guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kEagerWindowBytes); });
    if (link->connected()) link->channel().close_send();
  }
  const auto all = links.all();
  auto drained = [](auto& link) { return !link || link->drained(); };
  while (!std::all_of(all.begin(), all.end(), drained) && !deadline.expired())
    std::this_thread::sleep_for(milliseconds(1));
}

}  // namespace ringdp

#include "engine/goodbye.h"

#include <algorithm>
#include <thread>

namespace ringdp {

void say_goodbye(PeerLinks& links, const std::string& reason, Deadline deadline) {
  for (auto& link : links.all())
    if (link) link->send_bye(reason);  // who is not connected sees that nothing listens here
  // A peer that does not read must not keep this rank from leaving.
  while (links.anything_outgoing() && !deadline.expired())
    if (!links.send_all()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (auto& link : links.all()) {
    if (!link || !link->connected()) continue;
    links.guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kEagerWindowBytes); });
    if (link->connected()) link->channel().close_send();
  }
  const auto all = links.all();
  auto drained = [](auto& link) { return !link || link->drained(); };
  while (!std::all_of(all.begin(), all.end(), drained) && !deadline.expired())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace ringdp

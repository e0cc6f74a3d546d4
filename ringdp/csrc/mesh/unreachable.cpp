#include "mesh/unreachable.h"

#include <cerrno>

#include "base/text.h"
#include "transport/channel.h"

namespace ringdp {

UnreachableText unreachable_text(const PeerInfo& self, const PeerInfo& peer, const Connector::Failure& failure,
                                 const std::string& when) {
  std::string me = self.text(), it = peer.text();
  if (failure.lost)
    return {ErrorKind::kPeerLost, it + " died " + when + ": " + failure.text, "look at its log for the reason"};
  if (failure.large) {
    std::string also = failure.also.empty() ? "" : " (it looks the same with " + ranks_text(failure.also) + ")";
    return {ErrorKind::kHandshake,
            me + " and " + it +
                " are connected, but the path between them does not pass large packets: " + failure.text + also,
            kLargePacketsAdvice};
  }
  if (failure.refused)
    return {
        ErrorKind::kHandshake, me + " cannot reach " + it + ", nothing listens there any more: tried " + failure.text,
        "most likely it died or gave up: look at its log; or a firewall refuses connections (RINGDP_PORT_RANGE), or "
        "the address is another machine's (RINGDP_IFACE, RINGDP_ADVERTISE)"};
  if (failure.text.find(errno_text(EMFILE)) != std::string::npos)
    return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + failure.text,
            "raise the limit of descriptors where rank " + std::to_string(self.rank) + " runs (ulimit -n)"};
  return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + failure.text,
          "set RINGDP_IFACE where rank " + std::to_string(failure.peer) +
              " runs to the interface that leads to the other hosts, or RINGDP_ADVERTISE to an address they can reach; "
              "behind a firewall set RINGDP_PORT_RANGE to ports that it lets through"};
}

}  // namespace ringdp

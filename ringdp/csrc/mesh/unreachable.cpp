#include "mesh/unreachable.h"

#include <cerrno>

#include "base/text.h"
#include "transport/channel.h"

namespace ringdp {

UnreachableText unreachable_text(const PeerInfo& self, const PeerInfo& peer, const Connector::Trouble& trouble,
                                 const std::string& when) {
  std::string me = self.text(), it = peer.text();
  if (trouble.lost)
    return {ErrorKind::kPeerLost, it + " died " + when + ": " + trouble.text, "look at its log for the reason"};
  if (trouble.large) {
    std::string also = trouble.also.empty() ? "" : " (it looks the same with " + ranks_text(trouble.also) + ")";
    return {ErrorKind::kHandshake,
            me + " and " + it +
                " are connected, but the path between them does not pass large packets: " + trouble.text + also,
            kLargePacketsAdvice};
  }
  if (trouble.refused)
    return {
        ErrorKind::kHandshake, me + " cannot reach " + it + ", nothing listens there any more: tried " + trouble.text,
        "most likely it died or gave up: look at its log; or a firewall refuses connections (RINGDP_PORT_RANGE), or "
        "the address is another machine's (RINGDP_IFACE, RINGDP_ADVERTISE)"};
  if (trouble.text.find(errno_text(EMFILE)) != std::string::npos)
    return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + trouble.text,
            "raise the limit of descriptors where rank " + std::to_string(self.rank) + " runs (ulimit -n)"};
  return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + trouble.text,
          "set RINGDP_IFACE where rank " + std::to_string(trouble.peer) +
              " runs to the interface that leads to the other hosts, or RINGDP_ADVERTISE to an address they can reach; "
              "behind a firewall set RINGDP_PORT_RANGE to ports that it lets through"};
}

}  // namespace ringdp

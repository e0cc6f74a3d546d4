// The table of transports: one line each, in the order in which `auto` prefers them.
#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "transport/counted.h"
#include "transport/tls.h"
#include "transport/transport.h"

#define RINGDP_TRANSPORTS(X) \
  X(shm)                     \
  X(tcp)

namespace ringdp {

#define RINGDP_DECLARE(name) const Transport& name##_transport();
RINGDP_TRANSPORTS(RINGDP_DECLARE)
#undef RINGDP_DECLARE

Transports transports() {
#define RINGDP_ADDRESS(name) &name##_transport(),
  static const std::array all{RINGDP_TRANSPORTS(RINGDP_ADDRESS)};
#undef RINGDP_ADDRESS
  return all;
}

const Transport* find_transport(std::string_view name) {
  for (const Transport* it : transports())
    if (it->name == name) return it;
  return nullptr;
}

const Transport* transport_named(std::string_view name) {
  if (name == transport_setting(nullptr)) return nullptr;
  if (const Transport* found = find_transport(name)) return found;
  std::string names(transport_setting(nullptr));
  for (const Transport* it : transports()) names += (it == transports().back() ? " or " : ", ") + std::string(it->name);
  throw Error(ErrorKind::kValue, "transport must be " + names + ", not '" + std::string(name) + "'");
}

std::string_view transport_setting(const Transport* named) { return named != nullptr ? named->name : "auto"; }

std::unique_ptr<Channel> open_channel(const Transport& transport, PeerSocket first, std::vector<Fd> more) {
  more.insert(more.begin(), std::move(first.fd));
  std::unique_ptr<Channel> channel = transport.open(std::move(more));
  if (first.protection.tls) return make_tls_channel(std::move(channel), first.protection);
  if (first.protection.counted) return std::make_unique<CountedChannel>(std::move(channel));
  return channel;
}

TransportChoice choose_transport(const Transport* mine, const Transport* theirs, bool same_host, Transports from) {
  auto viable = [&](const Transport* it) { return same_host || !it->same_host; };
  if (mine != nullptr && !viable(mine)) mine = nullptr;
  if (theirs != nullptr && !viable(theirs)) theirs = nullptr;
  if (mine != nullptr && theirs != nullptr && mine != theirs) return {};
  const Transport* named = mine != nullptr ? mine : theirs;
  auto first_of = [&](auto&& wanted) {
    auto found = std::find_if(from.begin(), from.end(), [&](const Transport* it) { return viable(it) && wanted(*it); });
    return found != from.end() ? *found : nullptr;
  };
  TransportChoice choice;
  choice.required = named != nullptr;
  choice.first = named != nullptr ? named : first_of([](const Transport&) { return true; });
  choice.fallback = choice.first;
  if (choice.first->open == nullptr) choice.fallback = first_of([](const Transport& it) { return it.open != nullptr; });
  return choice;
}

}  // namespace ringdp

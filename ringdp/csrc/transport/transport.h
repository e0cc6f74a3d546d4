// Transport: the properties of a way to move bytes, and the table of all of them.
//
// To add one: a file of this folder with its Channel and a function NAME_transport() that returns its Transport, and
// the line X(NAME) in registry.cpp. From that table come the values of RINGDP_TRANSPORT, what `auto` takes, the names
// in log lines, registered_transports() in Python, and the parameters of tests/cpp/test_channel.cpp and
// tests/contract. Constants and pure functions, any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "transport/channel.h"
#include "transport/tls.h"

namespace ringdp {

struct Transport {
  std::string_view name;   // in RINGDP_TRANSPORT, in the job's store and for Python: "tcp"
  std::string_view title;  // in log lines: "TCP"
  bool same_host = false;  // only between ranks of one host
  bool direct = false;     // its channels have a DirectReader: polling for bytes takes no system call
  bool checksums = false;  // bytes may be corrupted on the way: frames have checksums if RINGDP_CHECKSUM asks for them

  // Opens the channel over the authenticated TCP connections to the peer: one, or several on a long path. An empty
  // one, not the first, is added to the channel later. Both ends call it after the peer's last handshake message; it
  // must not wait for the peer. Null: the ranks set up memory first, which can fail (shared/shared_setup.h).
  std::unique_ptr<Channel> (*open)(std::vector<Fd> sockets) = nullptr;
};

// The pair's channel over a transport that has `open`, with TLS over all of its connections together if they are to
// have it: only the first one needs a key.
std::unique_ptr<Channel> open_channel(const Transport& transport, PeerSocket first, std::vector<Fd> more);

using Transports = std::span<const Transport* const>;

Transports transports();                                 // all, in order of preference
const Transport* find_transport(std::string_view name);  // null: no transport has that name

// The value of RINGDP_TRANSPORT: null for "auto"; throws Error(kValue), with all names, if it is neither that nor a
// name.
const Transport* transport_named(std::string_view name);
std::string_view transport_setting(const Transport* named);  // the reverse

// The transports of a pair of ranks; the same result on both.
struct TransportChoice {
  const Transport* first = nullptr;     // null: the ranks name two different ones
  const Transport* fallback = nullptr;  // if the set-up of `first` fails; `first` itself if it has none
  bool required = false;                // a rank names `first`: a failure of its set-up is an error
};

// `mine` and `theirs`: what each rank names, null for auto. A name that does not apply to this pair (shared memory
// between two hosts) counts as auto; otherwise it decides for both ranks.
TransportChoice choose_transport(const Transport* mine, const Transport* theirs, bool same_host,
                                 Transports from = transports());

}  // namespace ringdp

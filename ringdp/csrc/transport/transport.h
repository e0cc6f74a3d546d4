// Transport: what there is to know about a way to move bytes before a channel exists, and the table of all of them.
//
// To add one: a file of this folder with its Channel and a function NAME_transport() that returns its Transport, and
// the line X(NAME) in registry.cpp. From that table come the values of RINGDP_TRANSPORT, what `auto` takes, the words
// of log lines, registered_transports() in Python, and the parameters of tests/cpp/test_channel.cpp and
// tests/contract. Constants and pure functions, any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "transport/channel.h"

namespace ringdp {

struct Transport {
  std::string_view name;   // in RINGDP_TRANSPORT, in the job's store and for Python: "tcp"
  std::string_view title;  // in log lines: "TCP"
  bool same_host = false;  // only between ranks of one host
  bool direct = false;     // its channels are (Channel::direct): looking for bytes takes no system call
  bool checksums = false;  // bytes may change on the way: frames carry checksums where RINGDP_CHECKSUM says so

  // The channel over the authenticated TCP connections to the peer, one or, where the path is long, several; an empty
  // one, not the first, is made later and then added to the channel. Both ends call it when the peer has nothing more
  // to say on them; it must not wait for the peer. Null: the ranks set memory up first, which can fail
  // (mesh/shared_setup.h).
  std::unique_ptr<Channel> (*open)(std::vector<Fd> sockets) = nullptr;
};

using Transports = std::span<const Transport* const>;

Transports transports();                                 // all, in order of preference
const Transport* find_transport(std::string_view name);  // null: there is none of that name

// What RINGDP_TRANSPORT says: null for "auto"; throws Error(kValue), with all names, where it is neither that nor a
// name.
const Transport* transport_named(std::string_view name);
std::string_view transport_setting(const Transport* named);  // the reverse

// What a pair of ranks uses. Both ranks come to the same.
struct TransportChoice {
  const Transport* first = nullptr;     // null: the ranks name two that exclude each other
  const Transport* fallback = nullptr;  // where the set-up of `first` fails; `first` itself where it has none
  bool required = false;                // a rank names `first`: if its set-up fails, that is an error
};

// `mine` and `theirs`: what each rank names, null for auto. A name that cannot be meant for this pair (shared memory
// between two hosts) counts as auto; otherwise it decides for both ranks.
TransportChoice choose_transport(const Transport* mine, const Transport* theirs, bool same_host,
                                 Transports from = transports());

}  // namespace ringdp

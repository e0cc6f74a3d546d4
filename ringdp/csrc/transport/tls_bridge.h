// TlsBridge: moves bytes between sockets of this host, in the clear, and connections with other launchers, by TLS
// (tls.h). For a store and for lines of a launcher: few bytes. Invariant: what was read from one side of a pair and is
// not sent on the other yet is at most a buffer. Owned by a launcher; one thread "tls-bridge" for all of its pairs;
// `join` is for any thread.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/inbox.h"
#include "transport/tls.h"

namespace ringdp {

class TlsBridge {
 public:
  static constexpr int64_t kSilenceMs = 8000;  // a host that is silent for so long ends its pairs

  explicit TlsBridge(const TlsSettings& settings);  // throws as make_tls_context does
  ~TlsBridge();                                     // ends all pairs
  TlsBridge(const TlsBridge&) = delete;
  TlsBridge& operator=(const TlsBridge&) = delete;

  // `key`, `dialled`: as of Protection.
  void join(Fd plain, Fd connection, const Digest& key, bool dialled);

 private:
  struct Pair {
    Fd plain;
    std::unique_ptr<Channel> channel;
    std::vector<std::byte> out{}, in{};  // to the channel; to the plain socket
    bool plain_ended = false, channel_ended = false;
    bool told = false;  // the channel's peer, that the plain side has ended
  };

  void run();
  bool pump(Pair& pair);  // false: it is over

  const std::shared_ptr<const TlsContext> context_;
  Inbox<Pair> coming_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp

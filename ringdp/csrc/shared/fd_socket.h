// FdSocket: the abstract Unix socket (unix(7)) with a random name at which a rank hands out the descriptors of the
// memory that it shares with ranks of its host. Nothing is in the file system, and other network namespaces cannot
// reach it. Any process of the host can read the name in /proc/net/unix and connect, so a connection counts only once
// it has shown a token; unauthenticated processes get a bounded number of connections, a bounded time, and no answer.
// Used by one thread.
//
// The messages between two ranks after the handshake and before the first frame: of one size, over their authenticated
// TCP connection and over the Unix socket that passes shared memory (docs/reference/wire_format.md). Over TCP each has
// a MAC, of a SharedMac. Encoding and checking only. Value types, any thread.
//
// How many unauthenticated connections a process keeps open at once. A pure function of its limit of descriptors; any
// thread.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/sha256.h"
#include "transport/tls.h"

namespace ringdp {

// `most`, but no more than a quarter of the descriptors that RLIMIT_NOFILE leaves to the process: the rest is for its
// ranks and its program. At least 1, so that a rank of this job can connect. `newest`: a descriptor that was opened
// just now, below which all numbers are in use; `held`: how many of those are unauthenticated connections.
std::size_t most_strangers(std::size_t most, int newest, std::size_t held);

inline constexpr std::size_t kSharedMessageBytes = 256;

using SharedToken = std::array<std::byte, 16>;
using SharedBytes = std::array<std::byte, kSharedMessageBytes>;

enum class SharedType : uint32_t {
  kOffer = 1,     // from the maker of the memory: the name of its socket, and a token
  kToken = 2,     // at that socket: the token of the offer
  kMemory = 3,    // back over that socket; a descriptor comes along
  kAccepted = 4,  // the memory is mapped and will be used
  kRefused = 5,   // it will not be used: `reason`
  kReady = 6,     // this rank and those that report through it have finished the set-up (ReadyTree)
  kAllReady = 7,  // all ranks have
  kGaveUp = 8     // the sender leaves; only where the store cannot give the reason (GivenUp)
};

struct SharedMessage {
  SharedType type = SharedType::kRefused;
  uint64_t ring_bytes = 0;
  // The longest round trip between hosts: of those ranks (kReady), of all (kAllReady).
  int64_t round_trip_us = 0;
  SharedToken name{};  // of the FdSocket
  SharedToken token{};
  std::string reason = {};  // cut to what fits

  SharedBytes encode() const;
  static std::optional<SharedMessage> decode(const SharedBytes& raw);
};

// The MACs of the messages in one direction of a TCP connection: with the connection's key, over a count too, so that
// none can be repeated or left out.
class SharedMac {
 public:
  SharedMac() = default;
  SharedMac(const Digest& key, bool of_dialler) : key_(key), of_dialler_(of_dialler) {}
  static SharedMac sending(const Protection& own) { return {own.key, own.dialled}; }
  static SharedMac receiving(const Protection& own) { return {own.key, !own.dialled}; }

  void sign(SharedBytes& message);          // the next one
  bool accept(const SharedBytes& message);  // false: it is not the next one

 private:
  Digest of(const SharedBytes& message) const;

  Digest key_{};
  bool of_dialler_ = false;
  uint64_t count_ = 0;
};

// The error of a rank that left during the rendezvous, which the others raise too.
struct GivenUp {
  ErrorKind kind = ErrorKind::kHandshake;
  int peer = -1;     // the guilty rank; -1: the one that left
  std::string text;  // true on every rank; cut to what fits

  SharedMessage message() const;
  static std::optional<GivenUp> from(const SharedMessage& message);  // nullopt: it is another message
};

// Reads messages of fixed size from a non-blocking stream, and a descriptor that comes along.
class SharedReader {
 public:
  SharedReader() = default;  // of a Unix socket
  explicit SharedReader(const SharedMac& mac) : mac_(mac) {}

  enum class Status { kWaiting, kMessage, kClosed, kNonsense };

  Status read(int fd);  // kClosed: `why` says how
  const SharedMessage& message() const { return message_; }
  Fd take_descriptor() { return std::move(descriptor_); }
  const std::string& why() const { return why_; }

 private:
  std::optional<SharedMac> mac_;
  SharedBytes buffer_{};
  std::size_t filled_ = 0;
  SharedMessage message_;
  Fd descriptor_;
  std::string why_;
};

// Whole or not at all: a fresh socket has room. 0 or errno's value; a descriptor may go along.
int send_shared_message(int fd, const SharedMessage& message, const Fd& descriptor = Fd());
int send_shared_message(int fd, const SharedMessage& message, SharedMac& mac);  // over TCP

class FdSocket {
 public:
  struct Client {
    Fd socket;
    ucred credentials{};
    int peer = -1;
  };

  // nullopt, and the reason as text, if no socket can be made.
  static std::optional<FdSocket> open(std::string& problem);

  const SharedToken& name() const { return name_; }
  void expect(const SharedToken& token, int peer);  // good for one connection

  void poll_for(std::vector<pollfd>& polled) const;
  std::vector<Client> serve();  // the clients that have shown a token since
  int turned_away() const { return turned_away_; }

 private:
  struct Stranger {
    Fd socket;
    SharedReader reader;
    Deadline deadline = Deadline::never();
    bool gone = false;
  };
  struct Expected {
    SharedToken token;
    int peer;
  };

  void attend(Stranger& stranger, std::vector<Client>& clients);
  int client_of(const SharedMessage& message);  // -1: of an unknown peer

  Fd listener_;
  SharedToken name_{};
  std::vector<Expected> expected_;
  std::list<Stranger> strangers_;
  Clock::time_point accept_after_{};  // a pause, since descriptors have run out
  int turned_away_ = 0;
};

// Connects to another rank's FdSocket. Empty: `error_number` says why; EAGAIN: too many wait there, try again.
Fd connect_fd_socket(const SharedToken& name, int& error_number);
ucred credentials_of(
    int fd);  // of the process at the other end (SO_PEERCRED); pid 0 and no user where the kernel does not say

}  // namespace ringdp

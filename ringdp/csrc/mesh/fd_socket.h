// FdSocket: the abstract Unix socket (unix(7)) with a random name at which a rank hands out the descriptors of the
// memory that it shares with ranks of its host. Nothing is in the file system, and other network namespaces cannot
// reach it. Any process of the host can read the name in /proc/net/unix and connect, so a connection counts only once
// it has shown a token; unauthenticated processes get a bounded number of connections, a bounded time, and no answer.
// Used by one thread.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/shared_message.h"

namespace ringdp {

// Reads messages of fixed size from a non-blocking stream, and a descriptor that comes along.
class SharedReader {
 public:
  enum class Status { kWaiting, kMessage, kClosed, kNonsense };

  Status read(int fd);  // kClosed: `why` says how
  const SharedMessage& message() const { return message_; }
  Fd take_descriptor() { return std::move(descriptor_); }
  const std::string& why() const { return why_; }

 private:
  SharedBytes buffer_{};
  std::size_t filled_ = 0;
  SharedMessage message_;
  Fd descriptor_;
  std::string why_;
};

// Whole or not at all: a fresh socket has room. 0 or errno's value; a descriptor may go along.
int send_shared_message(int fd, const SharedMessage& message, const Fd& descriptor = Fd());

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

// Door: where a rank waits with memory for ranks of its host, an abstract Unix socket (unix(7)) under a random name: nothing
// in the file system, and out of reach from other network namespaces. Any process of the host can read the name in
// /proc/net/unix and come here, so a guest is one only when it has shown a token; strangers get a bounded number of
// connections, a bounded time, and silence. Used by one thread.
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

class Door {
 public:
  struct Guest {
    Fd socket;
    ucred credentials{};
    int peer = -1;
  };

  // nullopt, and in words why, where there is no socket to be had.
  static std::optional<Door> open(std::string& problem);

  const SharedToken& name() const { return name_; }
  void expect(const SharedToken& token, int peer);  // good for one visit

  void poll_for(std::vector<pollfd>& polled) const;
  std::vector<Guest> serve();  // the guests that have shown a token since
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

  void attend(Stranger& stranger, std::vector<Guest>& guests);
  int visited_by(const SharedMessage& message);  // -1: by no guest we know

  Fd listener_;
  SharedToken name_{};
  std::vector<Expected> expected_;
  std::list<Stranger> strangers_;
  Clock::time_point accept_after_{};  // no descriptors are left: a pause
  int turned_away_ = 0;
};

// Connects to another rank's door. Empty: `error_number` says why; EAGAIN: too many wait there, come again.
Fd knock(const SharedToken& name, int& error_number);
ucred credentials_of(
    int fd);  // of the process at the other end (SO_PEERCRED); pid 0 and no user where it cannot be told

}  // namespace ringdp

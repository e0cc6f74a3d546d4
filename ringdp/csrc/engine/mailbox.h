// Mailbox: requests and answers between the members of a group: messages of a header and a payload of any size, each
// pair of members in a group of its own, so that a lost rank ends its own messages only. A message is taken when this
// rank expects one of that member in that box: at most one is kept there, the next ones wait at their sender, beyond
// the link's eager window. A small payload comes with its header, in one message of fixed size.
//
// Requests are for a thread that serves (`request`), and for the program's thread while it waits for an answer: it
// drives the engine meanwhile, so that two ranks that ask each other need no other thread. The serving thread leaves
// requests to it, also for kGrace after such a wait, when the next one may follow.
//
// Its receives may stay pending for as long as the job lasts (OpenGroup::let_rest). Owned by Python, a group's members
// make theirs alike. Any thread; `answer` on one at a time, and `request` on one. The driver's thread calls
// `header_came`, `came` and `lost`.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/group.h"

namespace ringdp {

// PayloadPool: memory of large payloads, kept for the next one of its size: fresh memory costs as much as a copy.
// Shared by the mailbox and the payloads. Any thread.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  std::shared_ptr<std::byte> take(std::size_t bytes);

 private:
  static constexpr std::size_t kLeastBytes = 1 << 20, kMost = 4;
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::mutex mutex_;
  std::vector<std::pair<std::size_t, std::unique_ptr<std::byte, Free>>> free_;
};

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  enum Box : int { kRequests, kAnswers };
  static constexpr std::size_t kFirstBytes = 4096;  // of the first message: the length, the header, a small payload
  static constexpr std::size_t kHeaderBytes = 64;   // of these, with the length
  static constexpr std::size_t kMostHeaderBytes = kHeaderBytes - sizeof(uint64_t);

  struct Message {
    Box box = kRequests;
    int from = -1;  // member of the group
    std::string header;
    std::shared_ptr<std::byte> payload;
    std::size_t bytes = 0;
    std::exception_ptr lost = {};  // that member is: no message of it comes any more
  };

  // `name`: the same on all members, never used before. `most_bytes`: of a payload that comes.
  static std::shared_ptr<Mailbox> make(const GroupHandle& of_all, const std::string& name, std::size_t most_bytes);
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Takes one more message of that member when it comes. Of the box of answers the next one is expected by itself.
  void expect(Box box, int from);
  // The payload of that member's next answer goes into this memory, if it has its size.
  void land(int from, std::shared_ptr<std::byte> memory, std::size_t bytes);
  // Throws the error by which that member was lost.
  void require(int member);
  // Waits for a request of any member, in turn, or for the loss of one, which is told once; nullopt after the time, or
  // when it is closed.
  std::optional<Message> request(int64_t timeout_ms);
  // Waits for that member's answer, or, where this rank `serves`, for a request as `request` does. Throws the error by
  // which that member was lost.
  std::optional<Message> answer(int from, int64_t timeout_ms, bool serves);
  // Sends `header`, kMostHeaderBytes at most, and `payload`; `keep_alive` is held until the member has taken it.
  // `waits`: first until less than kWindowBytes are on their way to it. Returns for how many nanoseconds. Throws the
  // error by which the member was lost.
  int64_t send(int to, Box box, std::string_view header, std::span<std::byte> payload, std::shared_ptr<void> keep_alive,
               bool waits);
  void close();  // after what was sent has been taken, or a second; idempotent

 private:
  static constexpr std::size_t kWindowBytes = 16 << 20;
  static constexpr std::size_t kInlineBytes = kFirstBytes - kHeaderBytes;

  struct Incoming {  // kept by the operation that writes into it
    std::shared_ptr<std::byte> first;
    std::shared_ptr<std::byte> payload;
    std::size_t bytes = 0;
  };
  struct Slot {                          // for messages of a peer in a box
    std::shared_ptr<Incoming> incoming;  // complete when `ready`
    // Of the header and the payload, held so that no thread is woken to drop them.
    std::array<std::shared_ptr<Work>, 2> receives;
    bool expected = false;
    bool ready = false;
  };
  struct Peer {
    std::shared_ptr<GroupHandle> group;  // null for this rank, and once closed; taken from `group_of`
    std::shared_ptr<const FailureListener> listener;
    std::array<Slot, 2> slots;  // by box
    std::pair<std::shared_ptr<std::byte>, std::size_t> landing;
    std::exception_ptr lost;
    bool told = false;
    std::mutex order;  // of messages to it
    std::deque<std::pair<std::shared_ptr<Work>, std::size_t>> sent;
    std::size_t on_their_way = 0;
  };

  explicit Mailbox(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  void open(const GroupHandle& of_all, const std::string& name);
  void hold(Slot& slot, std::size_t which, std::shared_ptr<Work> receive);
  void header_came(Box box, int from, const std::shared_ptr<Incoming>& incoming);
  void came(Box box, int from);
  void lost(int from, const std::exception_ptr& why);
  void changed(bool for_server);  // with the mutex
  Message take(Box box, int from);
  std::optional<Message> take_request();                     // with the mutex
  std::vector<std::shared_ptr<Work>> take_done(Peer& peer);  // whose buffers are released without a lock
  std::shared_ptr<GroupHandle> group_of(int member);         // throws where there is none
  Peer& peer(int member) { return peers_.at(static_cast<std::size_t>(member)); }

  const std::size_t most_bytes_;
  const std::shared_ptr<PayloadPool> pool_ = std::make_shared<PayloadPool>();
  std::shared_ptr<Engine> engine_;
  std::deque<Peer> peers_;  // by member; constant after `open`
  std::mutex mutex_;        // guards what comes in, of all peers; taken after `order`, held in no call of the engine
  std::atomic<uint64_t> changes_{0};        // of what comes in; written with the mutex
  std::condition_variable served_;          // for the thread in `request`
  bool dozes_ = false;                      // that looks by itself before long
  std::atomic<bool> waiter_serves_{false};  // `answer` gave a request, and its next call starts what is expected
  bool answer_awaited_ = false;             // by a thread that serves
  int requests_ = 0;                        // that have come, and losses, which nobody has taken
  Clock::time_point left_to_program_{};     // until when requests wait for the program's thread
  int last_ = -1;                           // whose request was the last one
  bool closed_ = false;
};

}  // namespace ringdp

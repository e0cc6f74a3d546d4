// Mailbox: messages of a header and a payload of any size between the members of a group, each pair of them in a group
// of its own, so that a lost rank ends its own messages only. A message is taken when this rank expects one of that
// member: at most one of each is kept, the next ones wait at their sender, beyond the link's eager window.
//
// Its receives may stay pending for as long as the job lasts (OpenGroup::let_rest). Owned by Python, a group's members
// make theirs alike. Any thread; none may hold the GIL. The driver's thread calls `header_came`, `came` and `lost`.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch/backend/process_group.h"

namespace ringdp {

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  static constexpr std::size_t kHeaderBytes = 64;
  static constexpr std::size_t kOwnBytes = sizeof(uint64_t);  // of the header, at its start: the payload's length

  struct Message {
    int from = -1;  // member of the group
    std::string header;
    at::Tensor payload;            // uint8, [bytes]
    std::exception_ptr lost = {};  // that member is: no message of it comes any more
  };

  // `name`: the same on all members, never used before. `most_bytes`: of a payload that comes.
  static std::shared_ptr<Mailbox> make(const ProcessGroupRing& ring, const std::string& name, std::size_t most_bytes);
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Takes one more message of that member when it comes.
  void expect(int from);
  // Throws the error by which that member was lost.
  void require(int member);
  // Waits for a message of that member, or of any one (-1), in turn; nullopt after the time, or when it is closed.
  // The loss of a member is told once where any one is waited for, and thrown where that member is.
  std::optional<Message> next(int from, int64_t timeout_ms);
  // Sends `header`, kHeaderBytes - kOwnBytes at most, and `payload`, which may be undefined; both are read until the
  // member has taken them. `waits`: first until less than kWindowBytes are on their way to it. Returns for how many
  // nanoseconds. Throws the error by which the member was lost.
  int64_t send(int to, std::string_view header, at::Tensor payload, bool waits);
  void close();  // after what was sent has been taken, or a second; idempotent

 private:
  static constexpr std::size_t kWindowBytes = 16 << 20;
  static constexpr int32_t kHeaders = 0, kPayloads = 1;  // tags

  struct Incoming {  // kept by the operation that writes into it
    std::array<std::byte, kHeaderBytes> header;
    std::shared_ptr<std::byte> payload;
    std::size_t bytes = 0;
  };
  struct Peer {
    std::unique_ptr<GroupHandle> group;  // null for this rank
    std::shared_ptr<const FailureListener> listener;
    std::shared_ptr<Incoming> incoming;  // complete when `ready`
    bool expected = false;
    bool ready = false;
    std::exception_ptr lost;
    bool told = false;
    std::mutex order;  // of messages to it
    std::deque<std::pair<std::shared_ptr<Work>, std::size_t>> sent;
    std::size_t on_their_way = 0;
  };

  explicit Mailbox(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  void open(const ProcessGroupRing& ring, const std::string& name);
  void header_came(int from, const std::shared_ptr<Incoming>& incoming);
  void came(int from);
  void lost(int from, const std::exception_ptr& why);
  static CallOptions options_of(std::shared_ptr<void> keep_alive, std::function<void()> after);
  std::vector<std::shared_ptr<Work>> take_done(Peer& peer);  // that Python's tensors are released without a lock

  const std::size_t most_bytes_;
  std::deque<Peer> peers_;  // by member; constant after `open`
  std::mutex mutex_;        // guards what comes in, of all peers; taken after `order`
  std::condition_variable changed_;
  int last_ = -1;  // whose message was the last one
  bool closed_ = false;
};

}  // namespace ringdp

// ViewMail: messages about groups' members, between the links and the threads that agree on them: a letterbox for each group.
// Owned by the Engine. Any thread may use it, but for `arrived`, which is the driver's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_safety.h"
#include "engine/driver_role.h"
#include "engine/peer_links.h"
#include "membership/link_agreement.h"

namespace ringdp {

class ViewMail {
 public:
  // `look_at_all`: moves what can be moved on all links, by the driver.
  ViewMail(DriverRole& role, PeerLinks& links, std::function<void()> look_at_all);

  void arrived(int from, uint64_t group, std::span<const std::byte> message);

  // Of one group of this rank. `group` is a number that all its ranks know, the same in all its views. The engine outlives it.
  std::unique_ptr<ViewPost> post(uint64_t group);

 private:
  class Post;

  void send(uint64_t group, int place, const std::vector<std::byte>& bytes);
  ViewPost::Letters receive(uint64_t group);
  std::vector<int> unreachable(const std::vector<int>& places);
  ViewPost::Letters take(uint64_t group);

  DriverRole& role_;
  PeerLinks& links_;
  const std::function<void()> look_at_all_;
  mutable Mutex mutex_;  // nothing else is locked while it is held
  std::map<uint64_t, ViewPost::Letters> letters_ RINGDP_GUARDED_BY(mutex_);
  std::size_t kept_ RINGDP_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringdp

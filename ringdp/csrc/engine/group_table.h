// GroupTable: the groups of an engine, by their number on the wire, with their order of calls, failures and listeners,
// and which of them have operations. Owned by the Engine. Any thread, except `busy`. Its mutex is locked last, and no
// callback runs while it is held.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "engine/driver_role.h"
#include "engine/group_state.h"

namespace ringdp {

class GroupTable {
 public:
  explicit GroupTable(const DriverRole& role) : role_(role) {}

  // The number is made from `key`, which is the same on all members, and from the number of earlier groups of that
  // key, so that frames of a destroyed group never reach a new group with the same members.
  GroupPtr add(uint64_t key, const GroupView& view, std::vector<int> neighbours, const std::string& name);
  void remove(uint64_t id);

  GroupPtr find(uint64_t id) const;  // null if there is none
  std::vector<GroupPtr> all() const;
  std::vector<GroupPtr> with(int peer) const;  // groups with that rank as a member

  // The number of the next operation in the group's order.
  uint64_t next_sequence(GroupState& group);
  uint64_t called_upto(const GroupState& group) const;  // of the last one; 0: none

  // A group fails once: false if it has failed already. Calls the listeners.
  bool fail(GroupState& group, const std::exception_ptr& failure);
  std::exception_ptr failure_of(const GroupState& group) const;
  // Calls the listener when the group fails, at once if it has failed. A listener that is gone is not called.
  void listen(uint64_t id, const std::weak_ptr<const FailureListener>& listener);
  // A group that does not exist here yet has failed: it gets that failure when it is made. Returns the group if it was
  // made meanwhile.
  GroupPtr fail_early(uint64_t id, const std::exception_ptr& failure);

  // The groups with operations queued or started. For the driver.
  std::vector<GroupPtr>& busy() {
    role_.assert_held();
    return busy_;
  }
  const std::vector<GroupPtr>& busy() const {
    role_.assert_held();
    return busy_;
  }
  void make_busy(const GroupPtr& group);

 private:
  const DriverRole& role_;
  std::vector<GroupPtr> busy_ RINGDP_GUARDED_BY(role_);

  mutable Mutex mutex_;
  std::map<uint64_t, GroupPtr> groups_ RINGDP_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> made_ RINGDP_GUARDED_BY(mutex_);                      // groups so far, by key
  std::map<uint64_t, std::exception_ptr> early_failures_ RINGDP_GUARDED_BY(mutex_);  // by number
};

}  // namespace ringdp

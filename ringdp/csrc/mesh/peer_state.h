// PeerState: a rank's answer to a peer that asks for the state of an operation (ping and pong,
// docs/reference/wire_format.md). The peer's engine answers, so the answer shows that the process lives even if its
// Python is stuck. Value type, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ringdp {

inline constexpr std::size_t kPeerStateBytes = 3072;  // longest encoding

// A rank for which others wait, and why. `hops`: how many ranks forwarded the report; 0: the reporter found it itself.
struct MissingRank {
  int rank = -1;
  int hops = 0;
  std::string why;
};

struct PeerState {
  enum class Progress : uint8_t {
    kNoGroup = 0,    // it has not created the group yet, or has destroyed it
    kNotCalled = 1,  // it has not called this operation
    kQueued = 2,     // called; earlier operations of the group have their turn first
    kRunning = 3,    // under way
    kDone = 4,       // over
    kFailed = 5      // its group has failed
  };

  Progress progress = Progress::kNoGroup;
  int64_t since_call_ms = -1;  // since it last called any operation; -1: never
  // Ranks from which this or an earlier operation of the group needs bytes or room; the rank itself: it waits for its
  // own device.
  std::vector<int> waits_for;
  std::string name;       // what it calls the operation that was asked for; empty without a name
  std::string last;       // what it called last in that group; empty if nothing
  std::string elsewhere;  // what it has under way in another group; empty if nothing
  // Of an operation that it has not called: all threads of its program wait for this operation of another group, the
  // one in `elsewhere`; `needs_asker`: that operation cannot end before the rank that asks has called it.
  uint64_t blocked_group = 0;  // its number on the wire; 0: a thread may call
  uint64_t blocked_sequence = 0;
  bool needs_asker = false;
  std::vector<MissingRank>
      missing;  // the ranks at the end of its chain of waiting, for ranks that are not connected with them

  std::string encode() const;
  static PeerState decode(std::span<const std::byte> raw);  // throws Error(kHandshake) if it is too short
};

}  // namespace ringdp

// What the Connector does for the further connections of a pair (ExtraStreams).
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "mesh/connector.h"

namespace ringdp {

void Connector::dial_streams(int peer) {
  while (auto stream = streams_.due(peer, Clock::now())) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.stream = *stream;
    attempt.streams = streams_.streams(peer);
    attempt.dialled = true;
    attempt.address = streams_.address(peer);
    attempt.deadline = Deadline::after_ms(kPeerPatienceMs);
    int error_number = 0;
    attempt.fd = start_connect(attempt.address, error_number);
    if (error_number != 0)
      drop(attempt, errno_text(error_number));
    else
      attempts_.push_back(std::move(attempt));
  }
}

bool Connector::is_late(const Attempt& attempt) const {
  if (attempt.stream > 0) return !streams_.lacks(attempt.peer, attempt.stream);
  return joined_[attempt.peer] != 0 || std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
           return it.peer == attempt.peer && it.stream == 0 && it.stage == Stage::kDone;
         });
}

// Of one that was accepted, the first connection may be slower than the others.
void Connector::collect_streams() {
  for (Attempt& it : attempts_) {
    if (it.stage != Stage::kDone || it.stream == 0 || joined_[it.peer] == 0) continue;
    const bool same =
        it.dialled || std::equal(instances_[it.peer].begin(), instances_[it.peer].end(), it.nonce.begin());
    if (same && streams_.lacks(it.peer, it.stream)) streams_.add(it.peer, it.stream, std::move(it.fd));
    it.stage = Stage::kFailed;
  }
}

}  // namespace ringdp

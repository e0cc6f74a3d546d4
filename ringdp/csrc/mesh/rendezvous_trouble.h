// RendezvousTrouble: publishes this rank's failure in the store, and reads the others', so that all ranks raise the
// same error. Owned by a RendezvousRun and used by its thread.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "mesh/introductions.h"
#include "mesh/rendezvous.h"
#include "mesh/shared_message.h"
#include "mesh/store.h"

namespace ringdp {

class RendezvousTrouble {
 public:
  RendezvousTrouble(Store& store, const RendezvousOptions& options, const Introductions& ranks)
      : store_(store), options_(options), ranks_(ranks) {}

  // The text must be true on every rank.
  Error failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const;
  Error failure(int from, const GivenUp& why) const;
  std::optional<Error> heard();  // another rank's failure

  // After an error on this rank: publishes it, or, if another rank was first, returns that rank's error. `stopped`: by
  // an exception that is not an Error (an interrupt). Throws only StoreLost.
  Error settle(const Error& error, bool stopped);
  Error store_lost(const Error& error) const;
  GivenUp words_for_peers(const Error& error) const;  // for peers that do not read the store any more

 private:
  std::string story_of(const Error& error) const;
  // waits until the others have read the failure, since the store may end with this process
  void linger(int limit_ms, int dead);

  Store& store_;
  const RendezvousOptions& options_;
  const Introductions& ranks_;
  bool heard_ = false;
};

}  // namespace ringdp

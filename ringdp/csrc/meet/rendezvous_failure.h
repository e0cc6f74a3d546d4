// RendezvousFailure: publishes this rank's failure in the store, and reads the others', so that all ranks raise the
// same error. Owned by a RendezvousRun and used by its thread.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "meet/peer_records.h"
#include "meet/rendezvous.h"
#include "meet/store.h"
#include "shared/fd_socket.h"

namespace ringdp {

class RendezvousFailure {
 public:
  RendezvousFailure(Store& store, const RendezvousOptions& options, const PeerRecords& ranks)
      : store_(store), options_(options), ranks_(ranks) {}

  // The text must be true on every rank.
  Error make_error(ErrorKind kind, int peer, const std::string& text, const std::string& advice) const;
  Error make_error(int from, const GivenUp& why) const;
  std::optional<Error> published();  // another rank's failure

  // After an error on this rank: publishes it, or, if another rank was first, returns that rank's error. `stopped`: by
  // an exception that is not an Error (an interrupt). Throws only StoreLost.
  Error agree(const Error& error, bool stopped);
  Error store_lost(const Error& error) const;
  GivenUp given_up(const Error& error) const;  // for peers that do not read the store any more

 private:
  std::string text_of(const Error& error) const;
  // waits until the others have read the failure, since the store may end with this process
  void linger(int limit_ms, int dead);

  Store& store_;
  const RendezvousOptions& options_;
  const PeerRecords& ranks_;
  bool read_ = false;
};

}  // namespace ringdp

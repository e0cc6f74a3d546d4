// RendezvousTrouble: what a rank does about trouble while the ranks meet: it tells the others through the store, hears
// from them, and all end with one story.
// Owned by a RendezvousRun and used by its thread.
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

  // `story` must be true on every rank.
  Error failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const;
  Error failure(int from, const GivenUp& why) const;
  std::optional<Error> heard();  // what another rank told

  // After an error on this rank: tells the others, or, where one of them was first, turns it into that rank's story.
  // `stopped`: by an exception that is not an Error (an interrupt). Throws only StoreLost.
  Error settle(const Error& error, bool stopped);
  Error store_lost(const Error& error) const;
  GivenUp words_for_peers(const Error& error) const;  // where no store tells them

 private:
  std::string story_of(const Error& error) const;
  void linger(int limit_ms, int dead);  // the store may end with this process: the others are to hear first

  Store& store_;
  const RendezvousOptions& options_;
  const Introductions& ranks_;
  bool heard_ = false;
};

}  // namespace ringdp

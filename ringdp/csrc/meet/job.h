// Job: the record of the job that rank 0 publishes, and its comparison with another rank's settings, which names the
// difference (version, world size, restart count, secret). Value types, any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "meet/handshake.h"
#include "meet/store.h"

namespace ringdp {

struct RendezvousOptions;

struct Job {
  JobId id{};
  std::vector<std::byte> secret;
};

// Rank 0: a new job and its record; the secret itself is in it only if the launcher gave none.
Job make_job(const RendezvousOptions& options, Record& record);

// Any other rank. If they differ, `problem` names the difference in a text that is true on every rank.
Job join_job(const Record& record, const RendezvousOptions& options, std::string& problem);

}  // namespace ringdp

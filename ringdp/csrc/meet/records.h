// What the ranks of a job write into its store before and while they meet, and read of each other.
//
// PeerRecords: the record that each rank of a job publishes in the store before the rendezvous: its identity, and
// its addresses. Publishes this rank's, and reads the others': where all pairs connect one by one, as they come, in a
// larger job as two RecordTrees. Nothing blocks but the store. Owned by a RendezvousRun and used by its thread.
//
// This rank's host and process: a name for messages, identities that ranks compare, and whether a process of this host
// still exists. Any thread.
//
// Job: the record of the job that rank 0 publishes, and its comparison with another rank's settings, which names the
// difference (version, world size, restart count, secret). Value types, any thread.
//
// RendezvousFailure: publishes this rank's failure in the store, and reads the others', so that all ranks raise the
// same error. Owned by a RendezvousRun and used by its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "link/connection.h"
#include "meet/handshake.h"
#include "meet/record_tree.h"
#include "meet/rendezvous.h"
#include "meet/store.h"
#include "shared/fd_socket.h"
#include "transport/transport.h"

namespace ringdp {

std::string host_name();

// Equal exactly when two ranks can reach each other over loopback: boot id and network namespace.
std::string network_identity();

// Equal when two ranks count as one host: `network_identity`, and `host_id` where it is set.
std::string host_identity(const std::string& host_id);

// A process, for other ranks of its host. Its number is valid in its process namespace only and may be reused, so the
// time of its start is part of it.
struct ProcessId {
  int64_t pid = -1;
  int64_t started = -1;  // clock ticks since the host's start, proc(5)
  std::string space;     // boot id and process namespace

  static ProcessId own();
  bool operator==(const ProcessId&) const = default;
};

// True only when it is certain: same process namespace, and the process does not exist any more (or is a zombie).
// False for a stopped or a busy process.
bool certainly_gone(const ProcessId& process);

// A rank's record: host, process, networks and settings.
Record own_record(const RendezvousOptions& options);
std::string identity_in(const Record& record);  // the `host_identity` of the rank that wrote it

struct PeerRecord {
  PeerInfo info;
  ProcessId process;
  std::string network;
  std::string identity;
  std::string site;
  std::vector<std::string> ips;
  std::string hello;
  const Transport* transport = nullptr;  // what it names in RINGDP_TRANSPORT; null: auto
  bool present = false;                  // all above was read
  std::vector<std::string> addresses;    // where it listens
  bool placed = false;                   // they were read
};

TransportChoice transport_between(const PeerRecord& a, const PeerRecord& b);

class PeerRecords {
 public:
  PeerRecords(Store& store, const RendezvousOptions& options);

  // The record of another living process with this rank, if there is one.
  std::optional<Record> rival() const;
  void publish();
  void publish_addresses(const std::vector<std::string>& addresses);

  struct Answers {
    bool any = false;
    std::vector<int> placed;  // ranks whose addresses were read
    int unreadable = -1;      // a rank that has set what no rank can read
  };
  // Reads some of the missing records; with `addresses` also these. `quiet`: the time since the last answer.
  Answers ask(bool addresses, Clock::duration quiet);
  void ask_for(int rank);  // its identity, unless that is known
  // The ranks that did not publish, and those that did not pass on what others have, no more than a thousand: as far
  // as this rank knows, and where records are gathered by the store, of which it may have read their identities then.
  RecordTree::Awaited awaited();

  const PeerRecord& operator[](int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  const PeerRecord& self() const { return (*this)[rank_]; }
  const std::vector<PeerRecord>& all() const { return ranks_; }
  bool all_present() const;
  bool all_placed() const;
  bool gathers() const { return identities_.has_value(); }  // by trees: records of others come with those of all

 private:
  using Key = std::pair<bool, int>;  // addresses or identity; rank

  Answers ask_trees(bool singly);
  void take(Key key_of, const std::string& text, Answers& answers);
  void take_identity(int rank, const Record& record);

  Store& store_;
  const int rank_;
  const Record own_record_;
  std::vector<PeerRecord> ranks_;
  std::optional<RecordTree> identities_;  // these two in jobs in which not all pairs connect
  std::optional<RecordTree> addresses_;
  std::size_t next_key_ = 0;
};

struct Job {
  JobId id{};
  std::vector<std::byte> secret;
};

// Rank 0: a new job and its record; the secret itself is in it only if the launcher gave none.
Job make_job(const RendezvousOptions& options, Record& record);

// Any other rank. If they differ, `problem` names the difference in a text that is true on every rank.
Job join_job(const Record& record, const RendezvousOptions& options, std::string& problem);

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

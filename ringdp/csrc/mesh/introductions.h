// Introductions: what each rank of a job has told of itself in the store before the ranks meet: who it is, and where it
// listens. Publishes this rank's, and asks for the others'. Nothing blocks but the store.
// Owned by a RendezvousRun and used by its thread.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "mesh/connection.h"
#include "mesh/host.h"
#include "mesh/record.h"
#include "mesh/rendezvous.h"
#include "mesh/store.h"
#include "transport/transport.h"

namespace ringdp {

// What a rank tells the others of itself before they meet: host, process, networks, and what it asks for.
Record introduction(const RendezvousOptions& options);

struct Introduction {
  PeerInfo info;
  ProcessId process;
  std::string network;
  std::string identity;
  std::string site;
  std::vector<std::string> ips;
  std::string hello;
  const Transport* transport = nullptr;  // what it names in RINGDP_TRANSPORT; null: auto
  bool present = false;                  // the above was read
  std::vector<std::string> addresses;    // where it listens
  bool placed = false;                   // they were read
};

TransportChoice transport_between(const Introduction& a, const Introduction& b);

class Introductions {
 public:
  Introductions(Store& store, const RendezvousOptions& options);

  // Another process that lives and has introduced itself as this rank.
  std::optional<Record> rival() const;
  void publish();
  void publish_addresses(const std::vector<std::string>& addresses);

  struct News {
    bool any = false;
    std::vector<int> placed;  // ranks whose addresses were read
  };
  // Asks for some of what is missing. `addresses`: for these as well. `quiet`: how long there has been nothing new.
  News ask(bool addresses, Clock::duration quiet);
  void ask_for(int rank);  // who it is, unless that is known

  const Introduction& operator[](int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  const Introduction& self() const { return (*this)[rank_]; }
  const std::vector<Introduction>& all() const { return ranks_; }
  bool all_present() const;
  bool all_placed() const;

 private:
  using Question = std::pair<bool, int>;  // where or who, which rank

  void take(Question question, const std::string& text, News& news);
  void take_who(int rank, const Record& record);

  Store& store_;
  const int rank_;
  const Record introduction_;
  std::vector<Introduction> ranks_;
  std::size_t next_question_ = 0;
};

}  // namespace ringdp

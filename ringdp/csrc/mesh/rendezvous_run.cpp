#include "mesh/rendezvous_run.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/log.h"
#include "base/text.h"
#include "mesh/late_connections.h"
#include "mesh/unreachable.h"

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr int kPollMs = 50;                    // how soon signals are seen
constexpr std::size_t kQuestionsPerLook = 32;  // to the store
constexpr std::size_t kQuestionsTogether = 128;
constexpr milliseconds kTogether{50};       // after the last news
constexpr milliseconds kLongestPause{250};  // between looks into the store
constexpr milliseconds kCheckEvery{200};    // whether the processes of this host live
constexpr int kLookUpMs = 3000;
constexpr milliseconds kPlacesWait{1000};  // for where those are that have connected
constexpr int kBacklog =
    1024;  // in the kernel: with less, a burst of strangers makes one of ours wait for a second SYN

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

std::string in_seconds(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

Record introduction(const RendezvousOptions& options) {
  // Addresses that cannot be used are not an error yet: all ranks may turn out to be on this host.
  std::vector<std::string> ips;
  for (const Interface& it : interfaces())
    if (!it.is_loopback) ips.push_back(it.ip);
  const ProcessId process = ProcessId::own();
  return {{"host", options.host_name.empty() ? host_name() : options.host_name},
          {"pid", std::to_string(process.pid)},
          {"started", std::to_string(process.started)},
          {"space", process.space},
          {"network", network_identity()},
          {"identity", host_identity(options.host_id)},
          {"site", options.site},
          {"ips", join(ips, ",")},
          {"transport", std::string(transport_setting(options.transport))},
          {"hello", options.hello}};
}

RendezvousRun::RendezvousRun(Store& store, const RendezvousOptions& options)
    : store_(store),
      options_(options),
      rank_(options.rank),
      world_(options.world),
      introduction_(introduction(options)),
      deadline_(Deadline::after_ms(options.absent_ms > 0 ? options.absent_ms : options.timeout_ms)),
      interfaces_(interfaces()),
      peers_(options.world),
      notice_at_(begin_ + milliseconds(options.first_notice_ms)),
      notice_every_(options.first_notice_ms) {
  for (int peer = 0; peer < world_; ++peer) peers_[peer].info.rank = peer;
  take_who(rank_, introduction_);
  Peer& self = peers_[rank_];
  self.hello = options.hello;  // as it is, with its line breaks
  self.present = self.placed = true;
}

Mesh RendezvousRun::run() {
  introduce();
  auto next_look = begin_;
  // A peer may have connected before its words in the store were read. Where it is must be known if they connect later.
  const bool later = world_ > options_.full_mesh_ranks;
  auto known = [&](const Peer& peer) { return peer.present && (peer.placed || !later); };
  // For connections that are made again it had better be known.
  std::optional<Clock::time_point> connected_at;
  auto places_come = [&] {
    const bool all = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.placed; });
    if (!connected_at) connected_at = Clock::now();
    return options_.heals && !all && Clock::now() - *connected_at < kPlacesWait;
  };
  while (!connector_ || !connector_->complete() || !std::all_of(peers_.begin(), peers_.end(), known) || places_come()) {
    auto now = Clock::now();
    if (now >= next_look) {
      if (look()) last_news_ = now;
      auto pause = std::chrono::duration_cast<milliseconds>(now - last_news_) / 4;
      next_look = now + std::clamp(pause, milliseconds(2), kLongestPause);
    }
    auto until_look = std::chrono::ceil<milliseconds>(next_look - Clock::now()).count();
    int wait_ms = deadline_.remaining_ms(static_cast<int>(std::clamp<int64_t>(until_look, 0, kPollMs)));
    if (connector_)
      connector_->step(wait_ms);
    else
      poll(nullptr, 0, wait_ms);
    if (options_.check_interrupt) options_.check_interrupt();
    check_connections();
    check_processes();
    note_arrivals();
    say_who_is_missing();
    if (deadline_.expired()) time_out();
  }
  set_up_transports();
  Mesh mesh;
  mesh.peers.resize(world_);
  for (int peer = 0; peer < world_; ++peer) {
    MeshPeer& met = mesh.peers[peer];
    met.info = peers_[peer].info;
    met.host_identity = peers_[peer].identity;
    met.site = peers_[peer].site;
    met.hello = peers_[peer].hello;
    if (peer == rank_) continue;
    met.transport = &sharing_->transport(peer);
    met.checksums = options_.checksums && met.transport->checksums;
    if (at_start(peer)) met.channel = sharing_->take(peer);
  }
  mesh.round_trip_us = sharing_->round_trip_us();
  const bool streams = std::any_of(mesh.peers.begin(), mesh.peers.end(),
                                   [](const MeshPeer& it) { return it.channel && !it.channel->direct(); });
  if (later || (options_.heals && streams)) mesh.late = leave_the_rest();
  return mesh;
}

std::unique_ptr<LateConnections> RendezvousRun::leave_the_rest() {
  LateConnections::Start rest{.rank = rank_,
                              .connector = std::move(*connector_),
                              .sharing = std::move(*sharing_),
                              .peers = {},
                              .elsewhere = std::vector<char>(world_, 0),
                              .congestion = options_.congestion,
                              .all_connected = world_ <= options_.full_mesh_ranks,
                              .checksums = options_.checksums};
  const Peer& self = peers_[rank_];
  for (int peer = 0; peer < world_; ++peer) {
    rest.peers.push_back(peers_[peer].info);
    rest.elsewhere[peer] = peers_[peer].network != self.network;
  }
  return std::make_unique<LateConnections>(std::move(rest));
}

// ---- What stands in the store ----

void RendezvousRun::introduce() {
  const Peer& self = peers_[rank_];
  if (auto text = store_.find(key("who", rank_))) {
    Record other = read_record(*text);
    ProcessId process{number(field(other, "pid")), number(field(other, "started")), field(other, "space")};
    if (process != self.process && !certainly_gone(process))
      throw failure(ErrorKind::kHandshake, rank_,
                    "two processes have rank " + std::to_string(rank_) + ": pid " + field(other, "pid") + " on host " +
                        field(other, "host") + " and pid " + std::to_string(self.info.pid) + " on host " +
                        self.info.host,
                    "give every process a rank of its own; two jobs must not use the same MASTER_ADDR and MASTER_PORT");
  }
  store_.set(key("who", rank_), write_record(introduction_));
  if (rank_ > 0) return;
  Record record;
  job_ = make_job(options_, record);
  store_.set("job", write_record(record));
}

bool RendezvousRun::look() {
  if (auto error = heard_trouble()) throw *error;
  bool news = false;
  if (!job_) {
    auto text = store_.find("job");
    if (text) take_job(*text);
    news = text.has_value();
  }
  if (ask()) news = true;
  listen_if_known();
  return news;
}

// Ranks that were started together are asked for together, in two round trips. Those that have come are asked for one by one
// when others keep them waiting.
bool RendezvousRun::ask() {
  std::vector<std::pair<bool, int>> open;  // who or where, which rank
  for (int peer = 0; peer < world_; ++peer)
    if (!peers_[peer].placed && (!peers_[peer].present || connector_)) open.emplace_back(peers_[peer].present, peer);
  bool together = Clock::now() < last_news_ + kTogether;
  std::size_t count = std::min(together ? kQuestionsTogether : kQuestionsPerLook, open.size());
  std::vector<std::pair<bool, int>> questions;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < count; ++i) {
    questions.push_back(open[next_question_++ % open.size()]);
    keys.push_back(key(questions.back().first ? "at" : "who", questions.back().second));
  }
  bool news = false;
  if (together) {
    auto texts = store_.find_all(keys);
    for (std::size_t i = 0; texts && i < count; ++i) take(questions[i], (*texts)[i]);
    return texts.has_value() && count > 0;
  }
  for (std::size_t i = 0; i < count; ++i) {
    auto text = store_.find(keys[i]);
    if (text) take(questions[i], *text);
    news = news || text;
  }
  return news;
}

void RendezvousRun::take(std::pair<bool, int> question, const std::string& text) {
  question.first ? take_at(question.second, text) : take_who(question.second, read_record(text));
}

void RendezvousRun::take_job(const std::string& text) {
  std::string problem;
  job_ = join_job(read_record(text), options_, problem);
  if (!problem.empty())
    throw failure(ErrorKind::kHandshake, 0, problem,
                  "start all ranks with the same version of ringdp and the same settings");
}

void RendezvousRun::take_who(int rank, const Record& record) {
  Peer& peer = peers_[rank];
  peer.info = {rank, field(record, "host"), number(field(record, "pid"))};
  peer.process = {peer.info.pid, number(field(record, "started")), field(record, "space")};
  peer.network = field(record, "network");
  peer.identity = field(record, "identity");
  peer.site = field(record, "site");
  peer.ips = split(field(record, "ips"), ',');
  peer.hello = field(record, "hello");
  peer.transport = find_transport(field(record, "transport"));
  peer.present = true;
}

void RendezvousRun::take_at(int rank, const std::string& text) {
  if (!connector_) return;
  Peer& peer = peers_[rank];
  auto published = split(field(read_record(text), "addresses"), ',');
  bool same_network = peer.network == peers_[rank_].network;
  // A process of this host is known to live. A group that it had, with listeners of its own, may be gone all the same.
  bool same_processes = peer.process.space == peers_[rank_].process.space && !options_.listeners;
  const Transport* first = transport_between(peers_[rank_], peer).first;
  connector_->set_route(rank, candidates_of_peer(published, same_network, interfaces_, kLookUpMs), !same_processes,
                        first == nullptr || first->open == nullptr);
  peer.placed = true;
}

// On loopback once it is certain that everybody is on this host; on addresses others can reach as soon as one is not.
void RendezvousRun::listen_if_known() {
  if (!job_ || connector_) return;
  const Peer& self = peers_[rank_];
  bool all_here = true, away = options_.several_hosts && !self.ips.empty();
  for (const Peer& it : peers_) {
    all_here = all_here && it.present;
    bool chosen = !options_.interface.empty() && it.identity != self.identity;
    away = away || (it.present && (it.network != self.network || chosen));
  }
  if (!all_here && !away) return;
  HandshakeFields mine;
  mine.job = job_->id;
  mine.epoch = options_.epoch;
  mine.to = static_cast<uint32_t>(rank_);
  mine.world = static_cast<uint32_t>(world_);
  auto listeners = options_.listeners ? options_.listeners()
                                      : open_listeners(addresses_to_listen_on(!away), options_.port_low,
                                                       options_.port_high, std::max(kBacklog, world_));
  const auto published = addresses_to_publish(listeners, away ? options_.advertise : "");
  std::vector<char> wanted(world_, 0);
  for (int peer = 0; peer < world_; ++peer) wanted[peer] = at_start(peer);
  connector_.emplace(mine, job_->secret, wanted, options_.streams, options_.congestion);
  connector_->door().listen_on(std::move(listeners));
  store_.set(key("at", rank_), write_record({{"addresses", join(published, ",")}}));
}

std::vector<std::string> RendezvousRun::addresses_to_listen_on(bool alone) const {
  if (alone) {
    for (const Interface& it : interfaces_)
      if (it.is_loopback && it.ip == "127.0.0.1") return {it.ip};
    for (const Interface& it : interfaces_)
      if (it.is_loopback) return {it.ip};
    return {"127.0.0.1"};
  }
  // An address that another host has as well (docker0) leads nowhere; a family that no other rank has, neither.
  std::set<std::string> elsewhere, families;
  auto family = [](const std::string& ip) { return std::string(ip.find(':') == std::string::npos ? "4" : "6"); };
  for (const Peer& it : peers_) {
    if (!it.present || it.network == peers_[rank_].network) continue;
    elsewhere.insert(it.ips.begin(), it.ips.end());
    for (const std::string& ip : it.ips) families.insert(family(ip));
  }
  std::vector<std::string> wanted, useful;
  for (const Interface& it : select_interfaces(interfaces_, options_.interface)) {
    wanted.push_back(it.ip);
    bool leads_somewhere = !elsewhere.contains(it.ip) && (families.empty() || families.contains(family(it.ip)));
    if (leads_somewhere) useful.push_back(it.ip);
  }
  return useful.empty() ? wanted : useful;
}

// ---- Who is still to be had ----

void RendezvousRun::check_processes() {
  auto now = Clock::now();
  if (now < check_after_) return;
  check_after_ = now + std::max(kCheckEvery, milliseconds(10 * world_));
  for (int rank = 0; rank < world_; ++rank) {
    Peer& peer = peers_[rank];
    // A connection tells by itself, and tells a rank that left in good order from one that died.
    if (rank == rank_ || !peer.present || (connector_ && connector_->connected(rank))) continue;
    bool gone = certainly_gone(peer.process);
    // Once more: what it did last may still be on its way.
    if (gone && peer.suspected)
      throw failure(ErrorKind::kPeerLost, rank,
                    peer.info.text() + " died while the ranks met: there is no such process",
                    "look at its log for the reason");
    if (gone) check_after_ = now + milliseconds(kPollMs);
    peer.suspected = gone;
  }
}

void RendezvousRun::check_connections() {
  if (!connector_) return;
  auto trouble = connector_->trouble();
  if (!trouble) return;
  if (trouble->given_up) throw failure(trouble->peer, *trouble->given_up);
  if (!peers_[trouble->peer].present)  // it connected before its words were read
    if (auto text = store_.find(key("who", trouble->peer))) take_who(trouble->peer, read_record(*text));
  UnreachableText text =
      unreachable_text(peers_[rank_].info, peers_[trouble->peer].info, *trouble, "while the ranks met");
  throw failure(text.kind, trouble->peer, text.story, text.advice);
}

std::string RendezvousRun::missing_text() const {
  std::vector<std::string> absent, unconnected;
  for (int rank = 0; rank < world_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_ || (connector_ && connector_->connected(rank))) continue;
    if (peer.present && !at_start(rank)) continue;
    if (!peer.present) absent.push_back(std::to_string(rank));
    std::string why = connector_ ? connector_->problem(rank) : "";
    unconnected.push_back(peer.info.text() + (why.empty() ? "" : " [" + why + "]"));
  }
  if (absent.empty()) return join(unconnected, ", ");
  constexpr std::size_t kShown = 8;
  std::size_t more = absent.size() > kShown ? absent.size() - kShown : 0;
  std::string ranks = absent.size() > 1 ? "ranks " : "rank ";
  absent.resize(absent.size() - more);
  return ranks + join(absent, ", ") + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

void RendezvousRun::note_arrivals() {
  if (complete_ || !std::all_of(peers_.begin(), peers_.end(), [](const Peer& it) { return it.present; })) return;
  complete_ = true;
  if (options_.absent_ms > 0) deadline_ = Deadline::after_ms(options_.timeout_ms);
}

void RendezvousRun::say_who_is_missing() {
  if (Clock::now() < notice_at_) return;
  notice_every_ *= 2;
  notice_at_ += notice_every_;
  log(LogLevel::kWarning, "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + " waits for " +
                              missing_text() + (complete_ ? " to connect" : " to join"));
}

void RendezvousRun::time_out() {
  std::string waited = " Timed out after " + in_seconds(Clock::now() - begin_) + ": it waited for ";
  std::string me = peers_[rank_].info.text();
  auto absent = std::find_if(peers_.begin(), peers_.end(), [](const Peer& it) { return !it.present; });
  if (absent != peers_.end())
    throw failure(ErrorKind::kTimeout, absent->info.rank,
                  me + waited + missing_text() + " of " + std::to_string(world_) + ", which never came",
                  "did they start, and with the same MASTER_ADDR and MASTER_PORT? Their logs say more");
  int first = 0;
  auto waits_for = [&](int peer) {
    return peer != rank_ && (at_start(peer) ? !connector_ || !connector_->connected(peer) : !peers_[peer].placed);
  };
  while (first + 1 < world_ && !waits_for(first)) ++first;
  throw failure(ErrorKind::kTimeout, first, me + waited + missing_text() + " to connect",
                "look at their logs: they may be stopped, or very slow (RINGDP_CONNECT_TIMEOUT is the limit)");
}

}  // namespace ringdp

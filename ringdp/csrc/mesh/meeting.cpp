#include "mesh/meeting.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "base/log.h"

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr int kPollMs = 50;                    // how soon signals are seen
constexpr std::size_t kQuestionsPerLook = 32;  // to the store
constexpr milliseconds kLongestPause{250};     // between looks into the store
constexpr milliseconds kCheckEvery{200};       // whether the processes of this host live
constexpr int kLookUpMs = 3000;
constexpr int kBacklog =
    1024;  // in the kernel: with less, a burst of strangers makes one of ours wait for a second SYN
constexpr int kLingerMs = 600;
constexpr int kLingerStoppedMs = 300;  // somebody sits at the keyboard

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

std::string in_seconds(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

// RINGDP_ADVERTISE with the listener's port, unless it brings one of its own: "node7", "node7:30000", "fd00::7".
std::string advertised(const std::string& text, uint16_t port) {
  bool v6 = std::count(text.begin(), text.end(), ':') > 1;
  if (!text.empty() && text.front() == '[') v6 = false;
  std::string whole = v6 ? "[" + text + "]" : text;
  bool has_port = whole.rfind(':') != std::string::npos && whole.back() != ']';
  return has_port ? whole : whole + ":" + std::to_string(port);
}

}  // namespace

Meeting::Meeting(Store& store, const RendezvousOptions& options)
    : store_(store),
      options_(options),
      rank_(options.rank),
      world_(options.world),
      deadline_(Deadline::after_ms(options.absent_ms > 0 ? options.absent_ms : options.timeout_ms)),
      interfaces_(interfaces()),
      peers_(options.world),
      notice_at_(begin_ + milliseconds(options.first_notice_ms)),
      notice_every_(options.first_notice_ms) {
  for (int peer = 0; peer < world_; ++peer) peers_[peer].info.rank = peer;
  Peer& self = peers_[rank_];
  self.info = {rank_, options.host_name.empty() ? host_name() : options.host_name, getpid()};
  self.process = ProcessId::own();
  self.network = network_identity();
  self.identity = host_identity(options.host_id);
  self.hello = options.hello;
  self.transport = transport_name(options.transport);
  self.present = self.placed = true;
}

std::vector<MetPeer> Meeting::run() {
  introduce();
  auto last_news = begin_, next_look = begin_;
  // A peer may have connected before its words in the store were read.
  auto present = [](const Peer& peer) { return peer.present; };
  while (!connector_ || !connector_->complete() || !std::all_of(peers_.begin(), peers_.end(), present)) {
    auto now = Clock::now();
    if (now >= next_look) {
      if (look()) last_news = now;
      auto pause = std::chrono::duration_cast<milliseconds>(now - last_news) / 4;
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
  share_memory();
  std::vector<MetPeer> met(world_);
  for (int peer = 0; peer < world_; ++peer) {
    met[peer].info = peers_[peer].info;
    met[peer].host_identity = peers_[peer].identity;
    met[peer].hello = peers_[peer].hello;
    if (peer == rank_) continue;
    met[peer].transport = sharing_->shared(peer) ? "shm" : "tcp";
    met[peer].channel = sharing_->take(peer);
  }
  return met;
}

// ---- What stands in the store ----

void Meeting::introduce() {
  Peer& self = peers_[rank_];
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
  // What cannot be used is no reason to fail yet: everybody may turn out to be on this host.
  for (const Interface& it : interfaces_)
    if (!it.is_loopback) self.ips.push_back(it.ip);
  store_.set(key("who", rank_), write_record({{"host", self.info.host},
                                              {"pid", std::to_string(self.process.pid)},
                                              {"started", std::to_string(self.process.started)},
                                              {"space", self.process.space},
                                              {"network", self.network},
                                              {"identity", self.identity},
                                              {"ips", join(self.ips, ",")},
                                              {"transport", self.transport},
                                              {"hello", self.hello}}));
  if (rank_ > 0) return;
  Record record;
  job_ = make_job(options_, record);
  store_.set("job", write_record(record));
}

bool Meeting::look() {
  if (auto error = heard_trouble()) throw *error;
  bool news = false;
  if (!job_) {
    auto text = store_.find("job");
    if (text) take_job(*text);
    news = text.has_value();
  }
  std::vector<std::pair<bool, int>> questions;  // who or where, which rank
  for (int peer = 0; peer < world_; ++peer)
    if (!peers_[peer].placed) questions.emplace_back(peers_[peer].present, peer);
  for (std::size_t i = 0; i < std::min(kQuestionsPerLook, questions.size()); ++i) {
    auto [where, peer] = questions[next_question_++ % questions.size()];
    if (where && !job_) continue;
    auto text = store_.find(key(where ? "at" : "who", peer));
    if (!text) continue;
    news = true;
    where ? take_at(peer, *text) : take_who(peer, *text);
  }
  listen_if_known();
  return news;
}

void Meeting::take_job(const std::string& text) {
  std::string problem;
  job_ = join_job(read_record(text), options_, problem);
  if (!problem.empty())
    throw failure(ErrorKind::kHandshake, 0, problem,
                  "start all ranks with the same version of ringdp and the same settings");
}

void Meeting::take_who(int rank, const std::string& text) {
  Record record = read_record(text);
  Peer& peer = peers_[rank];
  peer.info = {rank, field(record, "host"), number(field(record, "pid"))};
  peer.process = {peer.info.pid, number(field(record, "started")), field(record, "space")};
  peer.network = field(record, "network");
  peer.identity = field(record, "identity");
  peer.ips = split(field(record, "ips"), ',');
  peer.hello = field(record, "hello");
  peer.transport = field(record, "transport");
  peer.present = true;
}

void Meeting::take_at(int rank, const std::string& text) {
  if (!connector_) return;
  Peer& peer = peers_[rank];
  auto published = split(field(read_record(text), "addresses"), ',');
  bool same_network = peer.network == peers_[rank_].network;
  bool same_processes = peer.process.space == peers_[rank_].process.space;
  connector_->set_route(rank, candidates_of_peer(published, same_network, interfaces_, kLookUpMs), !same_processes);
  peer.placed = true;
}

// On loopback once it is certain that everybody is on this host; on addresses others can reach as soon as one is not.
void Meeting::listen_if_known() {
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
  auto listeners =
      open_listeners(addresses_to_listen_on(!away), options_.port_low, options_.port_high, std::max(kBacklog, world_));
  std::vector<std::string> published;
  if (away && !options_.advertise.empty())
    published.push_back(advertised(options_.advertise, listeners.front().address().port()));
  for (const TcpListener& it : listeners) published.push_back(it.address().text());
  connector_.emplace(mine, job_->secret);
  connector_->listen_on(std::move(listeners));
  store_.set(key("at", rank_), write_record({{"addresses", join(published, ",")}}));
}

std::vector<std::string> Meeting::addresses_to_listen_on(bool alone) const {
  if (alone) {
    for (const Interface& it : interfaces_)
      if (it.is_loopback && it.ip == "127.0.0.1") return {it.ip};
    for (const Interface& it : interfaces_)
      if (it.is_loopback) return {it.ip};
    return {"127.0.0.1"};
  }
  // An address that another host has as well (docker0) leads nowhere; a family nobody else has, neither.
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

void Meeting::check_processes() {
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

void Meeting::check_connections() {
  if (!connector_) return;
  auto trouble = connector_->trouble();
  if (!trouble) return;
  std::string me = peers_[rank_].info.text(), peer = peers_[trouble->peer].info.text();
  if (trouble->lost)
    throw failure(ErrorKind::kPeerLost, trouble->peer, peer + " died while the ranks met: " + trouble->text,
                  "look at its log for the reason");
  if (trouble->refused)
    throw failure(ErrorKind::kHandshake, trouble->peer,
                  me + " cannot reach " + peer + ", nothing listens there any more: tried " + trouble->text,
                  "most likely it died or gave up: look at its log; or a firewall refuses connections "
                  "(RINGDP_PORT_RANGE), or the address is another machine's (RINGDP_IFACE, RINGDP_ADVERTISE)");
  std::string advice =
      "set RINGDP_IFACE where rank " + std::to_string(trouble->peer) +
      " runs to the interface that leads to the other hosts, or RINGDP_ADVERTISE to an address they can reach; behind "
      "a "
      "firewall set RINGDP_PORT_RANGE to ports that it lets through";
  throw failure(ErrorKind::kHandshake, trouble->peer, me + " cannot reach " + peer + ": tried " + trouble->text,
                advice);
}

std::string Meeting::missing_text() const {
  std::vector<std::string> absent, unconnected;
  for (int rank = 0; rank < world_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_ || (connector_ && connector_->connected(rank))) continue;
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

void Meeting::note_arrivals() {
  if (complete_ || !std::all_of(peers_.begin(), peers_.end(), [](const Peer& it) { return it.present; })) return;
  complete_ = true;
  if (options_.absent_ms > 0) deadline_ = Deadline::after_ms(options_.timeout_ms);
}

void Meeting::say_who_is_missing() {
  if (Clock::now() < notice_at_) return;
  notice_every_ *= 2;
  notice_at_ += notice_every_;
  log(LogLevel::kWarning, "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + " waits for " +
                              missing_text() + (complete_ ? " to connect" : " to join"));
}

void Meeting::time_out() {
  std::string waited = " Timed out after " + in_seconds(Clock::now() - begin_) + ": it waited for ";
  std::string me = peers_[rank_].info.text();
  auto absent = std::find_if(peers_.begin(), peers_.end(), [](const Peer& it) { return !it.present; });
  if (absent != peers_.end())
    throw failure(ErrorKind::kTimeout, absent->info.rank,
                  me + waited + missing_text() + " of " + std::to_string(world_) + ", which never came",
                  "did they start, and with the same MASTER_ADDR and MASTER_PORT? Their logs say more");
  int first = 0;
  while (first == rank_ || (connector_ && connector_->connected(first))) ++first;
  throw failure(ErrorKind::kTimeout, first, me + waited + missing_text() + " to connect",
                "look at their logs: they may be stopped, or very slow (RINGDP_CONNECT_TIMEOUT is the limit)");
}

// ---- One story for everybody ----

Error Meeting::failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const {
  ErrorContext context;
  peers_[rank_].info.fill_self(context);
  peers_[peer].info.fill_peer(context);
  context.cause = story;
  context.advice = advice;
  std::string self = "rank " + std::to_string(rank_);
  std::string message = story.starts_with(self + " ") ? story : self + " cannot join: " + story;
  return Error(kind, message + (advice.empty() ? "" : "; " + advice), context);
}

std::optional<Error> Meeting::heard_trouble() {
  auto text = store_.find("trouble");
  if (!text) return std::nullopt;
  heard_ = true;
  Record told = read_record(*text);
  store_.set(key("heard", rank_), "");
  auto rank_in = [&](const char* name) {
    int64_t rank = number(field(told, name));
    return rank >= 0 && rank < world_ ? static_cast<int>(rank) : -1;
  };
  int by = std::max(0, rank_in("by")), peer = rank_in("peer");
  if (peer < 0 || peer == rank_) peer = by;
  auto kind = static_cast<ErrorKind>(number(field(told, "kind")));
  if (kind != ErrorKind::kPeerLost && kind != ErrorKind::kTimeout) kind = ErrorKind::kHandshake;
  return failure(kind, peer, field(told, "story"), field(told, "advice"));
}

Error Meeting::settle_error(const Error& error, bool stopped) {
  Error out = error;
  if (!heard_ && !stopped)
    if (auto told = heard_trouble()) out = *told;
  if (!heard_) {
    const ErrorContext& context = error.context();
    std::string me = peers_[rank_].info.text();
    std::string story = context.cause.empty() ? me + ": " + error.what() : context.cause;
    store_.set("trouble", write_record({{"by", std::to_string(rank_)},
                                        {"peer", std::to_string(context.peer)},
                                        {"kind", std::to_string(static_cast<int>(error.kind()))},
                                        {"story", story},
                                        {"advice", context.advice}}));
    store_.set(key("heard", rank_), "");
  }
  linger(stopped ? kLingerStoppedMs : kLingerMs, out.kind() == ErrorKind::kPeerLost ? out.context().peer : -1);
  return out;
}

void Meeting::linger(int limit_ms, int dead) {
  if (rank_ != 0) return;
  for (Deadline deadline = Deadline::after_ms(limit_ms); !deadline.expired(); poll(nullptr, 0, 20)) {
    bool all = true;
    for (int rank = 1; rank < world_ && all; ++rank)
      all = rank == dead || !peers_[rank].present || certainly_gone(peers_[rank].process) ||
            store_.find(key("heard", rank));
    if (all) return;
  }
}

Error Meeting::store_lost(const Error& error) const {
  const Peer& keeper = peers_[0];
  for (Deadline deadline = Deadline::after_ms(500); keeper.present && !deadline.expired(); poll(nullptr, 0, 20))
    if (certainly_gone(keeper.process))
      return failure(ErrorKind::kPeerLost, 0,
                     keeper.info.text() + " died while the ranks met, and the job's store with it",
                     "look at its log for the reason");
  return failure(ErrorKind::kHandshake, 0,
                 "lost the job's store while the ranks met, Connection closed by peer: " +
                     (keeper.present ? keeper.info.text() : "rank 0") + ", its host, or the launcher has gone (" +
                     error.what() + ")",
                 "look at the log of rank 0");
}

}  // namespace ringdp

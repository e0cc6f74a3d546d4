#include "meet/records.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <sstream>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/sha256.h"
#include "meet/addresses.h"
#include "transport/tcp_health.h"

namespace ringdp {

namespace {

// The first bytes of a file of the kernel's; empty if it cannot be read. Not a stream: that would throw if the process
// ends between open and read.
std::string read_proc(const std::string& path) {
  Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> text;
  ssize_t count = file ? read(file.get(), text.data(), text.size()) : 0;
  return count > 0 ? std::string(text.data(), static_cast<std::size_t>(count)) : "";
}

std::string boot_id() {
  std::string boot;
  std::istringstream(read_proc("/proc/sys/kernel/random/boot_id")) >> boot;
  return boot;
}

std::string namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

struct ProcessStatus {
  bool found = false;
  char state = '?';
  int64_t threads = 0;
  int64_t started = -1;
};

// proc(5): the command is in brackets and may contain anything; after it come the state, and as fields 20 and 22 the
// number of threads and the time of the start.
ProcessStatus read_status(int64_t pid) {
  ProcessStatus status;
  std::string text = read_proc("/proc/" + std::to_string(pid) + "/stat");
  auto bracket = text.rfind(')');
  if (bracket == std::string::npos) return status;
  std::istringstream rest(text.substr(bracket + 1));
  std::string skipped;
  rest >> status.state;
  for (int field = 4; field < 20; ++field) rest >> skipped;
  rest >> status.threads >> skipped >> status.started;
  status.found = !rest.fail();
  return status;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

std::string network_identity() { return boot_id() + "/" + namespace_number("/proc/self/ns/net"); }

std::string host_identity(const std::string& host_id) { return network_identity() + "/" + host_id; }

ProcessId ProcessId::own() {
  return {getpid(), read_status(getpid()).started, boot_id() + "/" + namespace_number("/proc/self/ns/pid")};
}

bool certainly_gone(const ProcessId& process) {
  static const std::string here = ProcessId::own().space;
  if (process.pid <= 0 || process.started < 0 || process.space != here) return false;
  ProcessStatus now = read_status(process.pid);
  if (!now.found) return kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH;  // /proc may hide processes
  if (now.started != process.started) return true;
  return (now.state == 'Z' || now.state == 'X') && now.threads <= 1;  // else the main thread has ended, others live
}

namespace {

constexpr std::size_t kKeysPerRead = 32;  // to the store
constexpr std::size_t kKeysTogether = 128;
constexpr std::size_t kMostAwaited = 1000;
constexpr std::chrono::milliseconds kTogether{50};  // after the last answer

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

// The boot id of a host is long, and is in its record once.
std::string on_host(const Record& record, const char* key) { return field(record, "boot") + "/" + field(record, key); }

ProcessId process_in(const Record& record) {
  return {number(field(record, "pid")), number(field(record, "started")), on_host(record, "space")};
}

}  // namespace

Record own_record(const RendezvousOptions& options) {
  // Addresses that cannot be used are not an error yet: all ranks may be on this host.
  std::vector<std::string> ips;
  for (const Interface& it : interfaces())
    if (!it.is_loopback) ips.push_back(it.ip);
  const ProcessId process = ProcessId::own();
  return {{"host", options.host.name.empty() ? host_name() : options.host.name},
          {"pid", std::to_string(process.pid)},
          {"started", std::to_string(process.started)},
          {"boot", boot_id()},
          {"space", namespace_number("/proc/self/ns/pid")},
          {"network", namespace_number("/proc/self/ns/net")},
          {"host_id", options.host.id},
          {"site", options.host.site},
          {"ips", join(ips, ",")},
          {"transport", std::string(transport_setting(options.links.transport))},
          {"hello", options.hello}};
}

std::string identity_in(const Record& record) { return on_host(record, "network") + "/" + field(record, "host_id"); }

TransportChoice transport_between(const PeerRecord& a, const PeerRecord& b) {
  return choose_transport(a.transport, b.transport, a.identity == b.identity);
}

PeerRecords::PeerRecords(Store& store, const RendezvousOptions& options)
    : store_(store), rank_(options.rank), own_record_(own_record(options)), ranks_(options.world) {
  for (int rank = 0; rank < options.world; ++rank) ranks_[rank].info.rank = rank;
  take_identity(rank_, own_record_);
  PeerRecord& self = ranks_[rank_];
  self.hello = options.hello;  // unchanged, with its line breaks
  self.placed = true;
  if (options.world <= options.links.full_mesh_ranks) return;
  identities_.emplace(store, "who", rank_, options.world);
  addresses_.emplace(store, "at", rank_, options.world);
}

std::optional<Record> PeerRecords::rival() const {
  const auto text = store_.find(key("who", rank_));
  if (!text) return std::nullopt;
  Record other = read_record(*text);
  const ProcessId process = process_in(other);
  if (process == self().process || certainly_gone(process)) return std::nullopt;
  return other;
}

void PeerRecords::publish() {
  const std::string text = write_record(own_record_);
  return identities_ ? identities_->set(text) : store_.set(key("who", rank_), text);
}

void PeerRecords::publish_addresses(const std::vector<std::string>& addresses) {
  const std::string text = write_record({{"addresses", join(addresses, ",")}});
  return addresses_ ? addresses_->set(text) : store_.set(key("at", rank_), text);
}

// Asks for all ranks together, in two round trips, while they start together; for single ranks once some are late.
PeerRecords::Answers PeerRecords::ask(bool addresses, Clock::duration quiet) {
  if (identities_) return ask_trees(quiet >= kTogether);
  std::vector<Key> open;
  for (const PeerRecord& it : ranks_)
    if (!it.placed && (!it.present || addresses)) open.emplace_back(it.present, it.info.rank);
  const bool together = quiet < kTogether;
  const std::size_t count = std::min(together ? kKeysTogether : kKeysPerRead, open.size());
  std::vector<Key> asked;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < count; ++i) {
    asked.push_back(open[next_key_++ % open.size()]);
    keys.push_back(key(asked.back().first ? "at" : "who", asked.back().second));
  }
  Answers answers;
  if (together) {
    const auto texts = store_.find_all(keys);
    for (std::size_t i = 0; texts && i < count; ++i) take(asked[i], (*texts)[i], answers);
    return answers;
  }
  for (std::size_t i = 0; i < count; ++i)
    if (const auto text = store_.find(keys[i])) take(asked[i], *text, answers);
  return answers;
}

PeerRecords::Answers PeerRecords::ask_trees(bool singly) {
  Answers answers;
  const bool where = identities_->complete();
  RecordTree::Found found = (where ? *addresses_ : *identities_).step(singly);
  answers.unreadable = found.unreadable;
  for (const auto& [rank, text] : found.texts) {
    const PeerRecord& it = (*this)[rank];
    if (where ? !it.placed : !it.present) take({where, rank}, text, answers);
  }
  return answers;
}

RecordTree::Awaited PeerRecords::awaited() {
  RecordTree::Awaited out;
  if (identities_) {
    if (!identities_->complete()) {
      out = identities_->awaited(kMostAwaited);
      for (int rank : out.silent) ask_for(rank);
      return out;
    }
    const RecordTree::Awaited places = addresses_->awaited(kMostAwaited);  // all ranks came
    out.silent = places.absent;
    out.silent.insert(out.silent.end(), places.silent.begin(), places.silent.end());
    return out;
  }
  for (const PeerRecord& it : ranks_)
    if (!it.present) out.absent.push_back(it.info.rank);
  return out;
}

void PeerRecords::ask_for(int rank) {
  if (ranks_[rank].present) return;
  if (const auto text = store_.find(key("who", rank))) take_identity(rank, read_record(*text));
}

bool PeerRecords::all_present() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const PeerRecord& it) { return it.present; });
}

bool PeerRecords::all_placed() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const PeerRecord& it) { return it.placed; });
}

void PeerRecords::take(Key key_of, const std::string& text, Answers& answers) {
  const auto [where, rank] = key_of;
  answers.any = true;
  const Record record = read_record(text);
  if (!where) return take_identity(rank, record);
  ranks_[rank].addresses = split(field(record, "addresses"), ',');
  ranks_[rank].placed = true;
  answers.placed.push_back(rank);
}

void PeerRecords::take_identity(int rank, const Record& record) {
  PeerRecord& it = ranks_[rank];
  it.process = process_in(record);
  it.info = {rank, field(record, "host"), it.process.pid};
  it.network = on_host(record, "network");
  it.identity = identity_in(record);
  it.site = field(record, "site");
  it.ips = split(field(record, "ips"), ',');
  it.hello = field(record, "hello");
  it.transport = find_transport(field(record, "transport"));
  it.present = true;
}

// ---- The job ----

namespace {

constexpr const char* kOneSecret = "give the ranks of all hosts the same file (--secret-file, RINGDP_SECRET_FILE)";

// The items of `theirs` and `mine` ("name=value", one per name) that differ: {"a=1 b=2", "a=3 b=4"}.
std::pair<std::string, std::string> different_items(const std::string& theirs, const std::string& mine) {
  auto missing_in = [](const std::vector<std::string>& other, const std::vector<std::string>& items) {
    std::vector<std::string> out;
    for (const std::string& item : items)
      if (std::find(other.begin(), other.end(), item) == other.end()) out.push_back(item);
    return join(out, " ");
  };
  auto left = split(theirs, ' '), right = split(mine, ' ');
  return {missing_in(right, left), missing_in(left, right)};
}

// Shows in the store that a rank has the same secret, without revealing it.
std::string secret_check(const std::vector<std::byte>& secret) {
  return hex_encode(hmac_sha256(secret, std::as_bytes(std::span("ringdp secret check", 19))));
}

}  // namespace

Job make_job(const RendezvousOptions& options, Record& record) {
  Job job;
  if (options.job) {
    job.id = *options.job;
  } else {
    random_bytes(job.id);
  }
  job.secret = options.secret;
  record = {{"version", std::to_string(kProtocolVersion)},
            {"world", std::to_string(options.world)},
            {"epoch", std::to_string(options.epoch)},
            {"job", hex_encode(job.id)},
            {"checksums", options.links.checksums ? "1" : "0"},
            {"full_mesh_ranks", std::to_string(options.links.full_mesh_ranks)},
            {"streams", streams_text(options.links.streams)},
            {"tls", tls_mode_text(tls_mode_of(options.links.tls.get()))},
            {"tables", options.tables.text},
            {"tables_source", options.tables.source}};
  if (job.secret.empty()) {
    job.secret.resize(32);
    random_bytes(job.secret);
    record["secret"] = hex_encode(job.secret);
  }
  record["check"] = secret_check(job.secret);
  return job;
}

Job join_job(const Record& record, const RendezvousOptions& options, std::string& problem) {
  std::string self = "rank " + std::to_string(options.rank);
  auto same = [&](const char* key, const char* what, int64_t mine) {
    if (problem.empty() && number(field(record, key)) != mine)
      problem =
          std::string(what) + " differs: " + field(record, key) + " at rank 0, " + std::to_string(mine) + " at " + self;
  };
  same("version", "the protocol version", kProtocolVersion);
  same("world", "the world size", options.world);
  same("epoch", "the restart count", options.epoch);
  same("checksums", "RINGDP_CHECKSUM", options.links.checksums ? 1 : 0);
  same("full_mesh_ranks", "RINGDP_FULL_MESH_RANKS", options.links.full_mesh_ranks);
  if (problem.empty() && field(record, "streams") != streams_text(options.links.streams))
    problem = "RINGDP_STREAMS differs: " + field(record, "streams") + " at rank 0, " +
              streams_text(options.links.streams) + " at " + self;
  const std::string tls = tls_mode_text(tls_mode_of(options.links.tls.get()));
  if (problem.empty() && field(record, "tls") != tls)
    problem = "RINGDP_TLS differs: " + field(record, "tls") + " at rank 0, " + tls + " at " + self;
  if (problem.empty() && field(record, "tables") != options.tables.text) {
    auto [theirs, mine] = different_items(field(record, "tables"), options.tables.text);
    problem = "the algorithm table differs: " + theirs + " at rank 0 (" + field(record, "tables_source") + "), " +
              mine + " at " + self + " (" + options.tables.source + "); give all ranks the same RINGDP_TUNING";
  }
  Job job;
  auto id = hex_decode(field(record, "job"));
  bool published = record.contains("secret");
  if (!problem.empty()) return job;
  if (id.size() != job.id.size()) {
    problem = "rank 0 left an unreadable job number in the store";
  } else if (published && !options.secret.empty()) {
    problem = self + " has a secret file (RINGDP_SECRET_FILE), rank 0 has none; " + kOneSecret;
  } else if (!published && options.secret.empty()) {
    problem = "rank 0 has a secret file (RINGDP_SECRET_FILE), " + self + " has none; " + kOneSecret;
  } else {
    std::copy(id.begin(), id.end(), job.id.begin());
    job.secret = published ? hex_decode(field(record, "secret")) : options.secret;
    if (field(record, "check") != secret_check(job.secret)) problem = self + "'s secret is not rank 0's; " + kOneSecret;
  }
  return job;
}

// ---- A failure ----

namespace {

constexpr int kLingerMs = 600;
constexpr int kLingerStoppedMs = 300;               // a user waits at the keyboard
const std::string kLargePackets = "large packets";  // the code of that advice in the store, where texts are short

std::string read_key(int rank) { return "heard/" + std::to_string(rank); }

}  // namespace

Error RendezvousFailure::make_error(ErrorKind kind, int peer, const std::string& text,
                                    const std::string& advice) const {
  ErrorContext context;
  ranks_.self().info.fill_self(context);
  ranks_[peer].info.fill_peer(context);
  context.cause = text;
  context.advice = advice;
  std::string self = "rank " + std::to_string(options_.rank);
  std::string message = text.starts_with(self + " ") ? text : self + " cannot join: " + text;
  return Error(kind, message + (advice.empty() ? "" : "; " + advice), context);
}

Error RendezvousFailure::make_error(int from, const GivenUp& why) const {
  const bool known = why.peer >= 0 && why.peer < options_.world && why.peer != options_.rank;
  return make_error(why.kind, known ? why.peer : from, why.text, "rank " + std::to_string(from) + " has said so");
}

std::string RendezvousFailure::text_of(const Error& error) const {
  const std::string& cause = error.context().cause;
  return cause.empty() ? ranks_.self().info.text() + ": " + error.what() : cause;
}

GivenUp RendezvousFailure::given_up(const Error& error) const {
  return {error.kind(), error.context().peer, text_of(error)};
}

std::optional<Error> RendezvousFailure::published() {
  auto text = store_.find("trouble");
  if (!text) return std::nullopt;
  read_ = true;
  Record record = read_record(*text);
  store_.set(read_key(options_.rank), "");
  auto rank_in = [&](const char* name) {
    int64_t rank = number(field(record, name));
    return rank >= 0 && rank < options_.world ? static_cast<int>(rank) : -1;
  };
  int by = std::max(0, rank_in("by")), peer = rank_in("peer");
  if (peer < 0 || peer == options_.rank) peer = by;
  auto kind = static_cast<ErrorKind>(number(field(record, "kind")));
  if (kind != ErrorKind::kPeerLost && kind != ErrorKind::kTimeout) kind = ErrorKind::kHandshake;
  std::string advice = field(record, "advice");
  return make_error(kind, peer, field(record, "story"), advice == kLargePackets ? kLargePacketsAdvice : advice);
}

Error RendezvousFailure::agree(const Error& error, bool stopped) {
  Error out = error;
  if (!read_ && !stopped)
    if (auto first = published()) out = *first;
  if (!read_) {
    const ErrorContext& context = error.context();
    const std::string text = text_of(error);
    if (context.cause.empty() && context.peer >= 0)  // an error of the store
      out = make_error(error.kind(), context.peer, text, context.advice);
    std::string mine =
        write_record({{"by", std::to_string(options_.rank)},
                      {"peer", std::to_string(context.peer)},
                      {"kind", std::to_string(static_cast<int>(error.kind()))},
                      {"story", text},
                      {"advice", context.advice == kLargePacketsAdvice ? kLargePackets : context.advice}});
    bool first = store_.set_first("trouble", mine) == mine;
    auto theirs = published();
    if (!first && !stopped && theirs) out = *theirs;
  }
  linger(stopped ? kLingerStoppedMs : kLingerMs, out.kind() == ErrorKind::kPeerLost ? out.context().peer : -1);
  return out;
}

void RendezvousFailure::linger(int limit_ms, int dead) {
  if (options_.rank != 0) return;
  for (Deadline deadline = Deadline::after_ms(limit_ms); !deadline.expired(); poll(nullptr, 0, 20)) {
    bool all = true;
    for (int rank = 1; rank < options_.world && all; ++rank)
      all = rank == dead || !(ranks_[rank].present || ranks_.gathers()) || certainly_gone(ranks_[rank].process) ||
            store_.find(read_key(rank));
    if (all) return;
  }
}

Error RendezvousFailure::store_lost(const Error& error) const {
  const PeerRecord& keeper = ranks_[0];
  for (Deadline deadline = Deadline::after_ms(500); keeper.present && !deadline.expired(); poll(nullptr, 0, 20))
    if (certainly_gone(keeper.process))
      return make_error(ErrorKind::kPeerLost, 0,
                        keeper.info.text() + " died while the ranks met, and the job's store with it",
                        "look at its log for the reason");
  return make_error(ErrorKind::kHandshake, 0,
                    "lost the job's store while the ranks met, Connection closed by peer: " +
                        (keeper.present ? keeper.info.text() : "rank 0") + ", its host, or the launcher has gone (" +
                        error.what() + ")",
                    "look at the log of rank 0");
}

}  // namespace ringdp

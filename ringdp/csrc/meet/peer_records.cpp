#include "meet/peer_records.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <sstream>

#include "base/fd.h"
#include "meet/addresses.h"

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
constexpr std::chrono::milliseconds kTogether{50};  // after the last answer

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

ProcessId process_in(const Record& record) {
  return {number(field(record, "pid")), number(field(record, "started")), field(record, "space")};
}

}  // namespace

Record own_record(const RendezvousOptions& options) {
  // Addresses that cannot be used are not an error yet: all ranks may be on this host.
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
}

std::optional<Record> PeerRecords::rival() const {
  const auto text = store_.find(key("who", rank_));
  if (!text) return std::nullopt;
  Record other = read_record(*text);
  const ProcessId process = process_in(other);
  if (process == self().process || certainly_gone(process)) return std::nullopt;
  return other;
}

void PeerRecords::publish() { store_.set(key("who", rank_), write_record(own_record_)); }

void PeerRecords::publish_addresses(const std::vector<std::string>& addresses) {
  store_.set(key("at", rank_), write_record({{"addresses", join(addresses, ",")}}));
}

// Asks for all ranks together, in two round trips, while they start together; for single ranks once some are late.
PeerRecords::Answers PeerRecords::ask(bool addresses, Clock::duration quiet) {
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
  it.network = field(record, "network");
  it.identity = field(record, "identity");
  it.site = field(record, "site");
  it.ips = split(field(record, "ips"), ',');
  it.hello = field(record, "hello");
  it.transport = find_transport(field(record, "transport"));
  it.present = true;
}

}  // namespace ringdp

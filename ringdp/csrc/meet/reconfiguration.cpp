#include "meet/reconfiguration.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "meet/addresses.h"
#include "meet/records.h"
#include "meet/store.h"

namespace ringdp {
namespace {

constexpr std::string_view kPrefix = "ringdp-handle-";
constexpr std::size_t kMaxHandle = 1 << 16;
constexpr int kBacklog = 1024;  // others may connect long before this rank calls `meet`
constexpr std::size_t kShown = 24;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string proof_of(const std::vector<std::byte>& secret, Record record) {
  record.erase("proof");
  return hex_encode(hmac_sha256(secret, bytes_of("ringdp handle\n" + write_record(record))));
}

struct Member {
  std::string handle;
  Record record;

  std::string incarnation() const { return field(record, "incarnation"); }
  std::string text() const { return "host " + field(record, "host") + ", pid " + field(record, "pid"); }
};

Record read_handle(const std::string& handle, std::size_t place, std::size_t count) {
  Record record;
  if (handle.size() < kMaxHandle && handle.starts_with(kPrefix)) try {
      const auto raw = hex_decode(std::string_view(handle).substr(kPrefix.size()));
      record = read_record(std::string(reinterpret_cast<const char*>(raw.data()), raw.size()));
    } catch (const Error&) {  // not hexadecimal
    }
  if (number(field(record, "version")) < 0 || field(record, "incarnation").empty() ||
      field(record, "addresses").empty())
    throw Error(ErrorKind::kValue, "handle " + std::to_string(place) + " of " + std::to_string(count) +
                                       " is not one of the backend ring: '" + handle.substr(0, kShown) +
                                       (handle.size() > kShown ? "…'" : "'"));
  return record;
}

// The members' records in place of a store. Writes reach no other rank: a rank that gives up closes its connections,
// which the others see.
class HandleStore final : public Store {
 public:
  HandleStore(std::vector<std::string> records, std::string job) : records_(std::move(records)), job_(std::move(job)) {}

  void set(const std::string& /*key*/, const std::string& /*value*/) override {}
  std::string set_first(const std::string& /*key*/, const std::string& value) override { return trouble_ = value; }
  std::optional<std::string> find(const std::string& key) override {
    if (key == "job") return job_;
    if (key == "trouble") return trouble_.empty() ? std::nullopt : std::optional(trouble_);
    const auto slash = key.find('/');
    const int64_t rank = slash == std::string::npos ? -1 : number(key.substr(slash + 1));
    if (rank < 0 || rank >= static_cast<int64_t>(records_.size())) return std::nullopt;
    if (key.starts_with("heard/")) return "";  // no rank is waited for
    return records_[static_cast<std::size_t>(rank)];
  }

 private:
  std::vector<std::string> records_;  // by rank: identity and addresses
  std::string job_;
  std::string trouble_;  // of this rank
};

}  // namespace

Reconfiguration::Reconfiguration(RendezvousOptions options) : options_(std::move(options)) {
  options_.epoch = 0;  // ranks of different launchers may form a group
  options_.links.full_mesh_ranks = std::numeric_limits<int>::max();
  options_.links.heals = false;
  options_.hello.clear();
  random_bytes(incarnation_);
  random_bytes(token_);
  options_.addresses.listeners = [this] {
    std::vector<TcpListener> out;
    for (const TcpListener& it : listeners_) out.push_back(it.share());
    return out;
  };
}

const std::string& Reconfiguration::handle() {
  if (!handle_.empty()) return handle_;
  std::vector<std::string> ips{"127.0.0.1"};
  const auto all = interfaces();
  const bool alone = std::all_of(all.begin(), all.end(), [](const Interface& it) { return it.is_loopback; });
  if (!alone || !options_.addresses.interface.empty())
    for (const Interface& it : select_interfaces(all, options_.addresses.interface)) ips.push_back(it.ip);
  std::sort(ips.begin(), ips.end());
  ips.erase(std::unique(ips.begin(), ips.end()), ips.end());
  listeners_ = open_listeners(ips, options_.addresses.port_low, options_.addresses.port_high, kBacklog);
  Record record = own_record(options_);
  RendezvousOptions settings = options_;
  settings.job.emplace();
  Record shared;
  make_job(settings, shared);
  for (const char* key : {"version", "checksums", "streams", "tls", "tables", "tables_source"})
    record[key] = shared[key];
  record["incarnation"] = hex_encode(incarnation_);
  record["addresses"] = join(addresses_to_publish(listeners_, options_.addresses.advertise), ",");
  if (options_.secret.empty()) {
    record["token"] = hex_encode(token_);
  } else {
    record["proof"] = proof_of(options_.secret, record);
  }
  handle_ = std::string(kPrefix) + hex_encode(bytes_of(write_record(record)));
  return handle_;
}

Reconfiguration::Outcome Reconfiguration::meet(const Members& given, int64_t timeout_ms,
                                               const std::function<void()>& check_interrupt) {
  if (!used_.insert(given.uuid).second)
    throw Error(ErrorKind::kState,
                "reconfigure: uuid " + std::to_string(given.uuid) +
                    " was already used for this process group: each attempt needs a new one, the same "
                    "on all of its members");
  const std::string attempt = "reconfigure (uuid " + std::to_string(given.uuid) + ")";
  handle();  // the other members connect to its listeners
  std::vector<Member> members;
  for (std::size_t i = 0; i < given.handles.size(); ++i)
    members.push_back({given.handles[i], read_handle(given.handles[i], i, given.handles.size())});
  if (!given.ordered)
    std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) {
      return std::pair(identity_in(a.record), a.incarnation()) < std::pair(identity_in(b.record), b.incarnation());
    });
  const std::string self = hex_encode(incarnation_);
  Outcome outcome;
  outcome.world = static_cast<int>(members.size());
  std::vector<std::string> records;
  std::vector<std::byte> secret = options_.secret;
  std::string joined = std::to_string(given.uuid);
  std::set<std::string> seen;
  for (int rank = 0; rank < outcome.world; ++rank) {
    const Member& it = members[static_cast<std::size_t>(rank)];
    if (!seen.insert(it.incarnation()).second)
      throw Error(ErrorKind::kValue, attempt + ": the handle of the process on " + it.text() + " is there twice");
    if (it.incarnation() == self) outcome.rank = rank;
    const bool proved = it.record.contains("proof");
    if (proved != !options_.secret.empty())
      throw Error(ErrorKind::kHandshake, attempt + ": the process on " + it.text() + (proved ? " has" : " has no") +
                                             " secret file (RINGDP_SECRET_FILE), this one " +
                                             (proved ? "has none" : "has one"));
    if (proved && field(it.record, "proof") != proof_of(options_.secret, it.record))
      throw Error(ErrorKind::kHandshake,
                  attempt + ": the handle that names " + it.text() +
                      " was not made with this job's secret (RINGDP_SECRET_FILE), or was changed on its way");
    if (!proved) {
      const auto token = hex_decode(field(it.record, "token"));
      secret.insert(secret.end(), token.begin(), token.end());
    }
    joined += "\n" + it.handle;
    records.push_back(write_record(it.record));
  }
  if (outcome.rank < 0)
    throw Error(ErrorKind::kValue, attempt + ": this rank's own handle is not among the " +
                                       std::to_string(given.handles.size()) +
                                       " given: only the members of the new group call it, each with all handles");
  // For this attempt only: a message of another attempt does not authenticate here.
  const Digest attempt_secret = hmac_sha256(secret, bytes_of(joined));
  RendezvousOptions options = options_;
  options.rank = outcome.rank;
  options.world = outcome.world;
  options.secret.assign(attempt_secret.begin(), attempt_secret.end());
  options.waiting.timeout_ms = timeout_ms;
  options.waiting.check_interrupt = check_interrupt;
  options.job.emplace();
  const Digest number = sha256(options.secret);
  std::copy_n(number.begin(), options.job->size(), options.job->begin());
  // All ranks compare all settings with rank 0's, so that all raise the same.
  const Record& first = members.front().record;
  for (const Member& it : members)
    for (const auto& [key, what] : {std::pair{"version", "the protocol version"},
                                    {"checksums", "RINGDP_CHECKSUM"},
                                    {"streams", "RINGDP_STREAMS"},
                                    {"tls", "RINGDP_TLS"},
                                    {"tables", "the algorithm table (RINGDP_TUNING)"}})
      if (field(it.record, key) != field(first, key))
        throw Error(ErrorKind::kHandshake, attempt + ": " + what + " differs: " + field(first, key) + " on " +
                                               members.front().text() + ", " + field(it.record, key) + " on " +
                                               it.text());
  Record job;
  make_job(options, job);
  HandleStore store(std::move(records), write_record(job));
  try {
    outcome.mesh = ringdp::meet(store, options);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kInterrupted) throw;
    ErrorContext context = error.context();
    context.advice =
        "every member must call reconfigure with the same new uuid and the same handles, in time; this rank is "
        "what it was before, and may try again with another uuid";
    throw Error(error.kind(), attempt + " failed: " + error.what() + "; " + context.advice, context);
  }
  return outcome;
}

}  // namespace ringdp

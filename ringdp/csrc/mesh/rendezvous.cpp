#include "mesh/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "mesh/connector.h"
#include "mesh/handshake.h"
#include "mesh/host.h"

namespace ringdp {
namespace {

using Record = std::map<std::string, std::string>;

// What ranks leave in the store: lines of "key=value".
std::string write_record(const Record& record) {
  std::string out;
  for (const auto& [key, value] : record) out += key + "=" + value + "\n";
  return out;
}

Record read_record(const std::string& text) {
  Record record;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    if (auto equals = line.find('='); equals != std::string::npos)
      record[line.substr(0, equals)] = line.substr(equals + 1);
    at = end + 1;
  }
  return record;
}

int64_t number(const std::string& text) {
  int64_t value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// `how`: which ranks differ and in what, in words that are true on every rank.
[[noreturn]] void disagree(const RendezvousOptions& options, int peer, const std::string& how) {
  ErrorContext context;
  context.rank = options.rank;
  context.peer = peer;
  context.cause = how;
  context.advice = "start all ranks with the same version of ringdp and the same settings";
  throw Error(ErrorKind::kHandshake,
              "rank " + std::to_string(options.rank) + " cannot join: " + how + "; " + context.advice, context);
}

// Proves in the store that a rank holds the same secret, without showing it.
std::string secret_check(const std::vector<std::byte>& secret) {
  return hex_encode(hmac_sha256(secret, std::as_bytes(std::span("ringdp secret check", 19))));
}

struct Job {
  JobId id{};
  std::vector<std::byte> secret;
};

Job publish_job(Store& store, const RendezvousOptions& options) {
  Job job;
  random_bytes(job.id);
  job.secret = options.secret;
  Record record{{"version", std::to_string(kProtocolVersion)},
                {"world", std::to_string(options.world)},
                {"epoch", std::to_string(options.epoch)},
                {"job", hex_encode(job.id)}};
  if (job.secret.empty()) {
    job.secret.resize(32);
    random_bytes(job.secret);
    record["secret"] = hex_encode(job.secret);
  }
  record["check"] = secret_check(job.secret);
  store.set("job", write_record(record));
  return job;
}

Job join_job(Store& store, const RendezvousOptions& options, Deadline deadline) {
  auto text = store.get("job", deadline);
  if (!text) {
    ErrorContext context;
    context.rank = options.rank;
    context.peer = 0;
    throw Error(
        ErrorKind::kTimeout,
        "rank " + std::to_string(options.rank) + " Timed out waiting for rank 0 to start the job: is it running?",
        context);
  }
  Record record = read_record(*text);
  std::string self = "rank " + std::to_string(options.rank);
  // The others wait for this rank under this key: they are to hear the reason instead.
  auto refuse = [&](const std::string& how) {
    store.set("who/" + std::to_string(options.rank), write_record({{"problem", how}}));
    disagree(options, 0, how);
  };
  auto same = [&](const char* key, const char* what, int64_t mine) {
    if (number(record[key]) != mine)
      refuse(std::string(what) + " differs: " + record[key] + " at rank 0, " + std::to_string(mine) + " at " + self);
  };
  same("version", "the protocol version", kProtocolVersion);
  same("world", "the world size", options.world);
  same("epoch", "the restart count", options.epoch);
  Job job;
  auto id = hex_decode(record["job"]);
  if (id.size() != job.id.size()) refuse("rank 0 left an unreadable job number in the store");
  std::copy(id.begin(), id.end(), job.id.begin());
  bool published = record.contains("secret");
  if (published && !options.secret.empty()) refuse(self + " has a secret file (RINGDP_SECRET_FILE), rank 0 has none");
  if (!published && options.secret.empty())
    refuse("rank 0 has a secret file (RINGDP_SECRET_FILE), " + self + " has none");
  job.secret = published ? hex_decode(record["secret"]) : options.secret;
  if (record["check"] != secret_check(job.secret)) refuse(self + "'s secret is not rank 0's");
  return job;
}

// Reads `prefix/<rank>` of every rank; names all that are missing when the deadline passes.
std::vector<Record> read_all(Store& store, const std::string& prefix, const RendezvousOptions& options,
                             Deadline deadline) {
  std::vector<Record> records(options.world);
  std::string missing;
  int first_missing = -1;
  for (int peer = 0; peer < options.world; ++peer) {
    auto text = store.get(prefix + "/" + std::to_string(peer), missing.empty() ? deadline : Deadline::after_ms(0));
    if (text) {
      records[peer] = read_record(*text);
      if (records[peer].contains("problem")) disagree(options, peer, records[peer]["problem"]);
      continue;
    }
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
    if (first_missing < 0) first_missing = peer;
  }
  if (!missing.empty()) {
    ErrorContext context;
    context.rank = options.rank;
    context.peer = first_missing;
    context.cause = missing + " missing";
    context.advice = "look at the logs of the missing ranks: they were not started, or died on the way";
    throw Error(ErrorKind::kTimeout,
                "rank " + std::to_string(options.rank) + " Timed out waiting for its peers: " + context.cause + "; " +
                    context.advice,
                context);
  }
  return records;
}

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : ",") + part;
  return out;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(text.find(',', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> out;
  for (const Interface& it : interfaces())
    if (!it.is_loopback) out.push_back(it.ip);
  return out;
}

// Where to listen: loopback when everybody is on this host, otherwise the interface that reaches the others.
std::string choose_address(const RendezvousOptions& options, const std::vector<Record>& who) {
  const std::string& mine = who[options.rank].at("identity");
  std::string problem = "no other host published an address";
  bool alone = true;
  for (const Record& peer : who) alone = alone && peer.contains("identity") && peer.at("identity") == mine;
  if (alone) return "127.0.0.1";
  if (!options.interface.empty()) {
    std::string known;
    for (const Interface& it : interfaces()) {
      if (it.name == options.interface || it.ip == options.interface) return it.ip;
      known += (known.empty() ? "" : ", ") + it.name + " (" + it.ip + ")";
    }
    throw Error(ErrorKind::kSystem,
                "RINGDP_IFACE names no interface that is up: '" + options.interface + "'; there are " + known);
  }
  for (const Record& peer : who) {
    if (!peer.contains("identity") || peer.at("identity") == mine || !peer.contains("ips")) continue;
    for (const std::string& ip : split(peer.at("ips"))) {
      try {
        std::string local = local_ip_towards(SocketAddress::from_ip(ip, 9));
        if (!SocketAddress::from_ip(local, 0).is_loopback()) return local;
      } catch (const Error& error) {
        problem = error.what();
      }
    }
  }
  throw Error(ErrorKind::kSystem, "found no address under which the other hosts can reach this one (" + problem +
                                      "); set RINGDP_IFACE to the interface that leads to them");
}

}  // namespace

std::vector<MetPeer> meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  Deadline deadline = Deadline::after_ms(options.timeout_ms);
  std::vector<MetPeer> peers(options.world);
  std::string host = options.host_name.empty() ? host_name() : options.host_name;
  if (options.world == 1) {
    peers[0].info = {0, host, getpid()};
    peers[0].host_identity = host_identity(options.host_id);
    return peers;
  }
  Job job = options.rank == 0 ? publish_job(store, options) : join_job(store, options, deadline);
  store.set("who/" + std::to_string(options.rank), write_record({{"host", host},
                                                                 {"pid", std::to_string(getpid())},
                                                                 {"identity", host_identity(options.host_id)},
                                                                 {"ips", join(own_addresses())}}));
  auto who = read_all(store, "who", options, deadline);
  for (int peer = 0; peer < options.world; ++peer) {
    peers[peer].info = {peer, who[peer]["host"], number(who[peer]["pid"])};
    peers[peer].host_identity = who[peer]["identity"];
  }

  TcpListener listener(choose_address(options, who), options.port_low, options.port_high, std::max(128, options.world));
  SocketAddress published = listener.address();
  if (!options.advertise.empty() && !published.is_loopback())
    published = SocketAddress::from_ip(options.advertise, published.port());
  store.set("at/" + std::to_string(options.rank), write_record({{"address", published.text()}}));
  std::vector<SocketAddress> addresses(options.world);
  if (options.rank > 0) {
    auto at = read_all(store, "at", options, deadline);
    for (int peer = 0; peer < options.rank; ++peer) addresses[peer] = SocketAddress::parse(at[peer]["address"]);
  }
  HandshakeFields mine;
  mine.job = job.id;
  mine.epoch = options.epoch;
  mine.to = static_cast<uint32_t>(options.rank);
  mine.world = static_cast<uint32_t>(options.world);
  std::vector<Fd> sockets = Connector(listener, mine, job.secret).run(addresses, deadline, options.check_interrupt);
  for (int peer = 0; peer < options.world; ++peer)
    if (peer != options.rank) peers[peer].channel = make_tcp_channel(std::move(sockets[peer]));
  return peers;
}

}  // namespace ringdp

#include "meet/job.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/sha256.h"
#include "meet/rendezvous.h"

namespace ringdp {
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
  record = {{"version", std::to_string(kProtocolVersion)}, {"world", std::to_string(options.world)},
            {"epoch", std::to_string(options.epoch)},      {"job", hex_encode(job.id)},
            {"checksums", options.checksums ? "1" : "0"},  {"full_mesh_ranks", std::to_string(options.full_mesh_ranks)},
            {"streams", streams_text(options.streams)},    {"tables", options.tables},
            {"tables_source", options.tables_source}};
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
  same("checksums", "RINGDP_CHECKSUM", options.checksums ? 1 : 0);
  same("full_mesh_ranks", "RINGDP_FULL_MESH_RANKS", options.full_mesh_ranks);
  if (problem.empty() && field(record, "streams") != streams_text(options.streams))
    problem = "RINGDP_STREAMS differs: " + field(record, "streams") + " at rank 0, " + streams_text(options.streams) +
              " at " + self;
  if (problem.empty() && field(record, "tables") != options.tables) {
    auto [theirs, mine] = different_items(field(record, "tables"), options.tables);
    problem = "the algorithm table differs: " + theirs + " at rank 0 (" + field(record, "tables_source") + "), " +
              mine + " at " + self + " (" + options.tables_source + "); give all ranks the same RINGDP_TUNING";
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

}  // namespace ringdp

#include "mesh/job.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/sha256.h"
#include "mesh/rendezvous.h"

namespace ringdp {
namespace {

// Proves in the store that a rank holds the same secret, without showing it.
std::string secret_check(const std::vector<std::byte>& secret) {
  return hex_encode(hmac_sha256(secret, std::as_bytes(std::span("ringdp secret check", 19))));
}

}  // namespace

Job make_job(const RendezvousOptions& options, Record& record) {
  Job job;
  random_bytes(job.id);
  job.secret = options.secret;
  record = {{"version", std::to_string(kProtocolVersion)},
            {"world", std::to_string(options.world)},
            {"epoch", std::to_string(options.epoch)},
            {"job", hex_encode(job.id)}};
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
  Job job;
  auto id = hex_decode(field(record, "job"));
  bool published = record.contains("secret");
  if (!problem.empty()) return job;
  if (id.size() != job.id.size()) {
    problem = "rank 0 left an unreadable job number in the store";
  } else if (published && !options.secret.empty()) {
    problem = self + " has a secret file (RINGDP_SECRET_FILE), rank 0 has none";
  } else if (!published && options.secret.empty()) {
    problem = "rank 0 has a secret file (RINGDP_SECRET_FILE), " + self + " has none";
  } else {
    std::copy(id.begin(), id.end(), job.id.begin());
    job.secret = published ? hex_decode(field(record, "secret")) : options.secret;
    if (field(record, "check") != secret_check(job.secret)) problem = self + "'s secret is not rank 0's";
  }
  return job;
}

}  // namespace ringdp

// What a rank does about trouble while the ranks meet: it tells the others, hears from them, and all end with one story.
#include <poll.h>

#include <algorithm>

#include "mesh/rendezvous_run.h"

namespace ringdp {
namespace {

constexpr int kLingerMs = 600;
constexpr int kLingerStoppedMs = 300;               // a user waits at the keyboard
const std::string kLargePackets = "large packets";  // stands for that advice in the store: it must be short itself

std::string heard_key(int rank) { return "heard/" + std::to_string(rank); }

}  // namespace

Error RendezvousRun::failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const {
  ErrorContext context;
  peers_[rank_].info.fill_self(context);
  peers_[peer].info.fill_peer(context);
  context.cause = story;
  context.advice = advice;
  std::string self = "rank " + std::to_string(rank_);
  std::string message = story.starts_with(self + " ") ? story : self + " cannot join: " + story;
  return Error(kind, message + (advice.empty() ? "" : "; " + advice), context);
}

Error RendezvousRun::failure(int from, const GivenUp& why) const {
  const bool known = why.peer >= 0 && why.peer < world_ && why.peer != rank_;
  return failure(why.kind, known ? why.peer : from, why.story, "rank " + std::to_string(from) + " has said so");
}

void RendezvousRun::tell(const Error& error) {
  const std::string& cause = error.context().cause;
  const GivenUp why{error.kind(), error.context().peer,
                    cause.empty() ? peers_[rank_].info.text() + ": " + error.what() : cause};
  if (sharing_) {
    sharing_->tell(why);
  } else if (connector_) {
    connector_->tell(why);
  }
}

std::optional<Error> RendezvousRun::heard_trouble() {
  auto text = store_.find("trouble");
  if (!text) return std::nullopt;
  heard_ = true;
  Record told = read_record(*text);
  store_.set(heard_key(rank_), "");
  auto rank_in = [&](const char* name) {
    int64_t rank = number(field(told, name));
    return rank >= 0 && rank < world_ ? static_cast<int>(rank) : -1;
  };
  int by = std::max(0, rank_in("by")), peer = rank_in("peer");
  if (peer < 0 || peer == rank_) peer = by;
  auto kind = static_cast<ErrorKind>(number(field(told, "kind")));
  if (kind != ErrorKind::kPeerLost && kind != ErrorKind::kTimeout) kind = ErrorKind::kHandshake;
  std::string advice = field(told, "advice");
  return failure(kind, peer, field(told, "story"), advice == kLargePackets ? kLargePacketsAdvice : advice);
}

Error RendezvousRun::settle_error(const Error& error, bool stopped) {
  Error out = error;
  if (options_.listeners) {
    tell(error);
    return out;
  }
  if (!heard_ && !stopped)
    if (auto told = heard_trouble()) out = *told;
  if (!heard_) {
    const ErrorContext& context = error.context();
    std::string me = peers_[rank_].info.text();
    std::string story = context.cause.empty() ? me + ": " + error.what() : context.cause;
    if (context.cause.empty() && context.peer >= 0)  // of the store
      out = failure(error.kind(), context.peer, story, context.advice);
    std::string mine =
        write_record({{"by", std::to_string(rank_)},
                      {"peer", std::to_string(context.peer)},
                      {"kind", std::to_string(static_cast<int>(error.kind()))},
                      {"story", story},
                      {"advice", context.advice == kLargePacketsAdvice ? kLargePackets : context.advice}});
    bool first = store_.set_first("trouble", mine) == mine;
    auto told = heard_trouble();
    if (!first && !stopped && told) out = *told;
  }
  linger(stopped ? kLingerStoppedMs : kLingerMs, out.kind() == ErrorKind::kPeerLost ? out.context().peer : -1);
  return out;
}

void RendezvousRun::linger(int limit_ms, int dead) {
  if (rank_ != 0) return;
  for (Deadline deadline = Deadline::after_ms(limit_ms); !deadline.expired(); poll(nullptr, 0, 20)) {
    bool all = true;
    for (int rank = 1; rank < world_ && all; ++rank)
      all =
          rank == dead || !peers_[rank].present || certainly_gone(peers_[rank].process) || store_.find(heard_key(rank));
    if (all) return;
  }
}

Error RendezvousRun::store_lost(const Error& error) const {
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

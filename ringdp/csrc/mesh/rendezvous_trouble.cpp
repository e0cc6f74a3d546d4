#include "mesh/rendezvous_trouble.h"

#include <poll.h>

#include <algorithm>

#include "transport/channel.h"

namespace ringdp {
namespace {

constexpr int kLingerMs = 600;
constexpr int kLingerStoppedMs = 300;               // a user waits at the keyboard
const std::string kLargePackets = "large packets";  // the code of that advice in the store, where texts are short

std::string heard_key(int rank) { return "heard/" + std::to_string(rank); }

}  // namespace

Error RendezvousTrouble::failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const {
  ErrorContext context;
  ranks_.self().info.fill_self(context);
  ranks_[peer].info.fill_peer(context);
  context.cause = story;
  context.advice = advice;
  std::string self = "rank " + std::to_string(options_.rank);
  std::string message = story.starts_with(self + " ") ? story : self + " cannot join: " + story;
  return Error(kind, message + (advice.empty() ? "" : "; " + advice), context);
}

Error RendezvousTrouble::failure(int from, const GivenUp& why) const {
  const bool known = why.peer >= 0 && why.peer < options_.world && why.peer != options_.rank;
  return failure(why.kind, known ? why.peer : from, why.story, "rank " + std::to_string(from) + " has said so");
}

std::string RendezvousTrouble::story_of(const Error& error) const {
  const std::string& cause = error.context().cause;
  return cause.empty() ? ranks_.self().info.text() + ": " + error.what() : cause;
}

GivenUp RendezvousTrouble::words_for_peers(const Error& error) const {
  return {error.kind(), error.context().peer, story_of(error)};
}

std::optional<Error> RendezvousTrouble::heard() {
  auto text = store_.find("trouble");
  if (!text) return std::nullopt;
  heard_ = true;
  Record told = read_record(*text);
  store_.set(heard_key(options_.rank), "");
  auto rank_in = [&](const char* name) {
    int64_t rank = number(field(told, name));
    return rank >= 0 && rank < options_.world ? static_cast<int>(rank) : -1;
  };
  int by = std::max(0, rank_in("by")), peer = rank_in("peer");
  if (peer < 0 || peer == options_.rank) peer = by;
  auto kind = static_cast<ErrorKind>(number(field(told, "kind")));
  if (kind != ErrorKind::kPeerLost && kind != ErrorKind::kTimeout) kind = ErrorKind::kHandshake;
  std::string advice = field(told, "advice");
  return failure(kind, peer, field(told, "story"), advice == kLargePackets ? kLargePacketsAdvice : advice);
}

Error RendezvousTrouble::settle(const Error& error, bool stopped) {
  Error out = error;
  if (!heard_ && !stopped)
    if (auto told = heard()) out = *told;
  if (!heard_) {
    const ErrorContext& context = error.context();
    const std::string story = story_of(error);
    if (context.cause.empty() && context.peer >= 0)  // an error of the store
      out = failure(error.kind(), context.peer, story, context.advice);
    std::string mine =
        write_record({{"by", std::to_string(options_.rank)},
                      {"peer", std::to_string(context.peer)},
                      {"kind", std::to_string(static_cast<int>(error.kind()))},
                      {"story", story},
                      {"advice", context.advice == kLargePacketsAdvice ? kLargePackets : context.advice}});
    bool first = store_.set_first("trouble", mine) == mine;
    auto told = heard();
    if (!first && !stopped && told) out = *told;
  }
  linger(stopped ? kLingerStoppedMs : kLingerMs, out.kind() == ErrorKind::kPeerLost ? out.context().peer : -1);
  return out;
}

void RendezvousTrouble::linger(int limit_ms, int dead) {
  if (options_.rank != 0) return;
  for (Deadline deadline = Deadline::after_ms(limit_ms); !deadline.expired(); poll(nullptr, 0, 20)) {
    bool all = true;
    for (int rank = 1; rank < options_.world && all; ++rank)
      all =
          rank == dead || !ranks_[rank].present || certainly_gone(ranks_[rank].process) || store_.find(heard_key(rank));
    if (all) return;
  }
}

Error RendezvousTrouble::store_lost(const Error& error) const {
  const Introduction& keeper = ranks_[0];
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

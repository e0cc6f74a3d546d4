#include "meet/rendezvous_failure.h"

#include <poll.h>

#include <algorithm>

#include "transport/tcp_watch.h"

namespace ringdp {
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
      all =
          rank == dead || !ranks_[rank].present || certainly_gone(ranks_[rank].process) || store_.find(read_key(rank));
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

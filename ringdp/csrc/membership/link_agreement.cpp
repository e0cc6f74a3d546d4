#include "membership/link_agreement.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"

namespace ringdp {
namespace {

constexpr auto kShortestPause = std::chrono::microseconds(200);
constexpr auto kLongestPause = std::chrono::milliseconds(5);
constexpr std::size_t kMostEarly = 4096;
constexpr std::size_t kMostDecisions = 64;

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

ViewConsensusOptions LinkAgreement::options() {
  ViewConsensusOptions options;
  options.collect_ms = ViewConsensus::kNever;
  return options;
}

LinkAgreement::LinkAgreement(std::unique_ptr<ViewPost> post, std::unique_ptr<VotePages> pages)
    : post_(std::move(post)), pages_(std::move(pages)) {}

ViewDecision LinkAgreement::agree(ViewConsensus& change, const Look& look) {
  if (answering_view_ != change.view().number) answered_.clear();
  answering_view_ = change.view().number;
  auto pause = std::chrono::duration_cast<std::chrono::microseconds>(kShortestPause);
  ViewPost::Letters letters = std::exchange(early_, {});
  for (;;) {
    change.tick(now_ms());
    note_losses(change);
    for (auto& letter : post_->receive()) letters.push_back(std::move(letter));
    for (const auto& [from, bytes] : letters) take(change, from, bytes);
    put_out(change);
    if (change.decision()) break;
    if (change.standing().left_out) {
      if (pages_) pages_->leave();
      throw Error(ErrorKind::kState,
                  "the other ranks have gone on without this one, which missed what they decided, and "
                  "have ended since: its state is older than theirs, it has to end");
    }
    pause = letters.empty() ? std::min<std::chrono::microseconds>(pause * 3 / 2, kLongestPause) : kShortestPause;
    letters.clear();
    look(change.standing().waiting_for);
    std::this_thread::sleep_for(pause);
  }
  // Others answer for a rank that goes, before its process has ended.
  if (pages_ && !change.decision()->keeps(pages_->self())) pages_->leave();
  if (decisions_.size() == kMostDecisions) decisions_.erase(decisions_.begin());
  decisions_.push_back(*change.decision());
  return decisions_.back();
}

void LinkAgreement::note_losses(ViewConsensus& change) {
  const std::vector<int>& members = change.view().places;
  for (const int place : post_->unreachable(members)) change.suspect(place);
  if (!pages_) return;
  // The lowest rank of the host that lives answers for all that are dead. Who is dead stays dead, so no two ranks ever do.
  bool lowest = true;
  for (const int place : pages_->places()) {
    if (place == pages_->self()) continue;
    const bool dead = pages_->dead(place);
    if (place < pages_->self()) lowest = lowest && dead;
    if (dead && change.view().member_of(place) >= 0) change.suspect(place);
  }
  if (!lowest) return;
  for (const int place : pages_->places())
    if (place != pages_->self() && change.view().member_of(place) >= 0 && !answered_.contains(place) &&
        pages_->dead(place)) {
      change.answer_for(place, pages_->read(place));
      answered_.insert(place);
    }
}

void LinkAgreement::take(ViewConsensus& change, int from, const std::vector<std::byte>& bytes) {
  const ViewMessage message = ViewMessage::decode(bytes);
  if (message.view == change.view().number) return change.message(from, message);
  if (message.view > change.view().number) {
    if (early_.size() < kMostEarly) early_.emplace_back(from, bytes);
    return;
  }
  // The sender has not heard what was decided.
  for (const ViewDecision& decision : decisions_)
    if (decision.view == message.view + 1 && message.asks()) post_->send(from, ViewMessage::decided(decision).encode());
}

// A vote is in its page before another rank hears of it.
void LinkAgreement::put_out(ViewConsensus& change) {
  const ViewConsensus::Output output = change.take_output();
  if (pages_)
    for (const auto& [place, record] : output.records) pages_->write(place, record);
  for (const auto& [place, message] : output.messages) post_->send(place, message.encode());
}

}  // namespace ringdp

// MemberTurn: one member's way through a change of members, one access to the store after the other, as a value: what
// it asks the store next follows of what it was answered and of whom it cannot reach. The rules are in
// docs/design/elastic_agreement.md. Used by StoreAgreement with a store and a clock, and by
// tests/cpp/test_agreement.cpp with all that can happen.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "membership/agreement.h"

namespace ringdp {

// Others than these are wrong, and for the tests, which find them.
struct AgreementRules {
  Decision (*decide)(const std::vector<int>& members, const std::vector<MemberState>& states) = ringdp::decide;
  bool waits = true;         // until all that can be reached have said where they stand
  bool first_counts = true;  // of two decisions
};

struct StoreRequest {
  enum class Kind { kSet, kFind, kSetFirst };
  Kind kind = Kind::kFind;
  std::string key;
  std::string value;
};

class MemberTurn {
 public:
  MemberTurn(uint64_t view, std::vector<int> members, int self, const MemberState& mine,
             const AgreementRules& rules = {});

  // What to ask the store for now.
  const StoreRequest& request() const { return request_; }
  // What the store has under that key then.
  void answer(const std::optional<std::string>& value);
  // With these members there is no connection any more. At any time.
  void lose(const std::vector<int>& unreachable);

  const std::optional<Decision>& decision() const { return decision_; }
  // A round is over and others have to do something first: the caller may pause before the next request.
  bool waits() const { return stage_ == Stage::kLook && !waiting_for_.empty() && !decision_; }
  const std::vector<int>& waiting_for() const { return waiting_for_; }
  // Two turns of a member in a view with equal keys go on in the same way.
  std::string key() const;

 private:
  enum class Stage { kSay, kLook, kCollect, kDecide };

  void look();
  void begin_round();
  void collect();
  void decide();

  std::string prefix_;
  std::vector<int> members_;
  int self_;
  MemberState mine_;
  AgreementRules rules_;
  Stage stage_ = Stage::kSay;
  StoreRequest request_;
  std::vector<int> lost_;
  std::vector<int> living_;          // as this round began
  std::map<int, std::string> said_;  // by members: once, it stays
  std::vector<int> unasked_;         // in this round
  std::vector<int> waiting_for_;
  std::optional<Decision> decision_;
};

}  // namespace ringdp

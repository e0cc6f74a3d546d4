// MemberTurn: one member's part in a change of members, as a value. Its next request to the store follows from the
// answers so far and from the lost connections. The rules are in docs/design/elastic_agreement.md. Used by
// StoreAgreement with a store and a clock, and by tests/cpp/test_agreement.cpp with all orders of events.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "membership/agreement.h"

namespace ringdp {

// Other values are wrong rules, for the tests, which must find them.
struct AgreementRules {
  Decision (*decide)(const std::vector<int>& members, const std::vector<MemberState>& states) = ringdp::decide;
  bool waits = true;         // until all connected members have published their states
  bool looks = true;         // for a decision, again before each round in which it waits for states
  bool first_counts = true;  // of two decisions the first is final
};

struct StoreRequest {
  enum class Kind { kSet, kFind, kSetFirst };
  Kind kind = Kind::kFind;
  std::string key;
  std::string value;
};

// Writes the decision that ends a view, unless there is one. The answer is the one that counts.
StoreRequest decision_request(uint64_t view, const Decision& decision, const AgreementRules& rules = {});

// How long a member that waits for others leaves the store alone, after a pause of `last_s` (0: the first). In a large
// view it is longer: the one that collects the states is not to wait behind those that look for its decision.
double agreement_pause_s(double last_s, std::size_t members);

class MemberTurn {
 public:
  MemberTurn(uint64_t view, std::vector<int> members, int self, const MemberState& mine,
             const AgreementRules& rules = {});

  // The next request to the store.
  const StoreRequest& request() const { return request_; }
  // The store's answer to it.
  void answer(const std::optional<std::string>& value);
  // The connections to these members are lost. May be called at any time.
  void lose(const std::vector<int>& unreachable);

  const std::optional<Decision>& decision() const { return decision_; }
  // A round is over, and other members must act first: the caller may pause before the next request.
  bool waits() const { return stage_ == Stage::kLook && !waiting_for_.empty() && !decision_; }
  const std::vector<int>& waiting_for() const { return waiting_for_; }
  // Two turns of a member in a view with equal keys continue identically.
  std::string key() const;

 private:
  enum class Stage { kSay, kLook, kCollect, kDecide };

  void look();
  void begin_round();
  void collect();
  void decide();

  uint64_t view_;
  std::vector<int> members_;
  int self_;
  MemberState mine_;
  AgreementRules rules_;
  Stage stage_ = Stage::kSay;
  StoreRequest request_;
  std::vector<int> lost_;
  std::vector<int> living_;          // as this round began
  std::map<int, std::string> said_;  // by member; written once
  std::vector<int> unasked_;         // in this round
  std::vector<int> waiting_for_;
  std::optional<Decision> decision_;
};

}  // namespace ringdp

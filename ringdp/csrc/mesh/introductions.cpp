#include "mesh/introductions.h"

#include <algorithm>

#include "mesh/addresses.h"

namespace ringdp {
namespace {

constexpr std::size_t kQuestionsPerLook = 32;  // to the store
constexpr std::size_t kQuestionsTogether = 128;
constexpr std::chrono::milliseconds kTogether{50};  // after the last answer

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

ProcessId process_in(const Record& record) {
  return {number(field(record, "pid")), number(field(record, "started")), field(record, "space")};
}

}  // namespace

Record introduction(const RendezvousOptions& options) {
  // Addresses that cannot be used are not an error yet: all ranks may be on this host.
  std::vector<std::string> ips;
  for (const Interface& it : interfaces())
    if (!it.is_loopback) ips.push_back(it.ip);
  const ProcessId process = ProcessId::own();
  return {{"host", options.host_name.empty() ? host_name() : options.host_name},
          {"pid", std::to_string(process.pid)},
          {"started", std::to_string(process.started)},
          {"space", process.space},
          {"network", network_identity()},
          {"identity", host_identity(options.host_id)},
          {"site", options.site},
          {"ips", join(ips, ",")},
          {"transport", std::string(transport_setting(options.transport))},
          {"hello", options.hello}};
}

TransportChoice transport_between(const Introduction& a, const Introduction& b) {
  return choose_transport(a.transport, b.transport, a.identity == b.identity);
}

Introductions::Introductions(Store& store, const RendezvousOptions& options)
    : store_(store), rank_(options.rank), introduction_(introduction(options)), ranks_(options.world) {
  for (int rank = 0; rank < options.world; ++rank) ranks_[rank].info.rank = rank;
  take_who(rank_, introduction_);
  Introduction& self = ranks_[rank_];
  self.hello = options.hello;  // unchanged, with its line breaks
  self.placed = true;
}

std::optional<Record> Introductions::rival() const {
  const auto text = store_.find(key("who", rank_));
  if (!text) return std::nullopt;
  Record other = read_record(*text);
  const ProcessId process = process_in(other);
  if (process == self().process || certainly_gone(process)) return std::nullopt;
  return other;
}

void Introductions::publish() { store_.set(key("who", rank_), write_record(introduction_)); }

void Introductions::publish_addresses(const std::vector<std::string>& addresses) {
  store_.set(key("at", rank_), write_record({{"addresses", join(addresses, ",")}}));
}

// Asks for all ranks together, in two round trips, while they start together; for single ranks once some are late.
Introductions::News Introductions::ask(bool addresses, Clock::duration quiet) {
  std::vector<Question> open;
  for (const Introduction& it : ranks_)
    if (!it.placed && (!it.present || addresses)) open.emplace_back(it.present, it.info.rank);
  const bool together = quiet < kTogether;
  const std::size_t count = std::min(together ? kQuestionsTogether : kQuestionsPerLook, open.size());
  std::vector<Question> questions;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < count; ++i) {
    questions.push_back(open[next_question_++ % open.size()]);
    keys.push_back(key(questions.back().first ? "at" : "who", questions.back().second));
  }
  News news;
  if (together) {
    const auto texts = store_.find_all(keys);
    for (std::size_t i = 0; texts && i < count; ++i) take(questions[i], (*texts)[i], news);
    return news;
  }
  for (std::size_t i = 0; i < count; ++i)
    if (const auto text = store_.find(keys[i])) take(questions[i], *text, news);
  return news;
}

void Introductions::ask_for(int rank) {
  if (ranks_[rank].present) return;
  if (const auto text = store_.find(key("who", rank))) take_who(rank, read_record(*text));
}

bool Introductions::all_present() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& it) { return it.present; });
}

bool Introductions::all_placed() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& it) { return it.placed; });
}

void Introductions::take(Question question, const std::string& text, News& news) {
  const auto [where, rank] = question;
  news.any = true;
  const Record record = read_record(text);
  if (!where) return take_who(rank, record);
  ranks_[rank].addresses = split(field(record, "addresses"), ',');
  ranks_[rank].placed = true;
  news.placed.push_back(rank);
}

void Introductions::take_who(int rank, const Record& record) {
  Introduction& it = ranks_[rank];
  it.process = process_in(record);
  it.info = {rank, field(record, "host"), it.process.pid};
  it.network = field(record, "network");
  it.identity = field(record, "identity");
  it.site = field(record, "site");
  it.ips = split(field(record, "ips"), ',');
  it.hello = field(record, "hello");
  it.transport = find_transport(field(record, "transport"));
  it.present = true;
}

}  // namespace ringdp

#include "engine/operation_record.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "base/process_stacks.h"
#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostFlows = 32;  // of one operation that are remembered, in a large world
constexpr std::size_t kMostGroups = 256;
constexpr std::size_t kMostFailures = 16;
constexpr int kReadAttempts = 8;  // of a place that another operation is taking
constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

// All members are atomic, because they are read while they are written. `number` is 0 while another operation takes
// the place: a reader that sees the same number before and after has read one operation.
class OperationRecorder::Entry {
 public:
  std::atomic<uint64_t> number{0};
  std::atomic<bool> in_flight{false};
  std::atomic<uint64_t> ended_number{0};
  std::atomic<uint64_t> group{0};
  std::atomic<uint64_t> sequence{0};
  std::atomic<uint64_t> kind{0};  // what, dtype, op, algorithm: a byte each; the root above them
  std::atomic<uint64_t> count{0};
  std::atomic<uint32_t> name_hash{0};
  std::atomic<int32_t> call_site{-1};
  std::atomic<OperationState> state{OperationState::kQueued};
  std::atomic<int64_t> queued_ns{0};
  std::atomic<int64_t> started_ns{0};
  std::atomic<int64_t> ended_ns{0};
  std::atomic<uint32_t> flows_used{0};
  std::atomic<uint32_t> flows_left_out{0};
  std::atomic<uint32_t> name_bytes{0};
  std::array<std::atomic<uint64_t>, kRecordedNameBytes / 8> name{};
  FlowRecord* flows = nullptr;  // never changes
  std::size_t room = 0;

  void set_name(const std::string& text) {
    const std::size_t bytes = std::min(text.size(), kRecordedNameBytes);
    name_bytes.store(static_cast<uint32_t>(bytes), kRelaxed);
    for (std::size_t at = 0; at < bytes; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, bytes - at));
      name[at / 8].store(word, kRelaxed);
    }
  }
  std::string read_name() const {
    std::string out(std::min<std::size_t>(name_bytes.load(kRelaxed), kRecordedNameBytes), '\0');
    for (std::size_t at = 0; at < out.size(); at += 8) {
      const uint64_t word = name[at / 8].load(kRelaxed);
      std::memcpy(out.data() + at, &word, std::min<std::size_t>(8, out.size() - at));
    }
    return out;
  }
};

const char* operation_state_name(OperationState state) {
  switch (state) {
    case OperationState::kQueued:
      return "queued";
    case OperationState::kStarted:
      return "started";
    case OperationState::kDone:
      return "done";
    case OperationState::kFailed:
      break;
  }
  return "failed";
}

uint64_t OperationRecord::bytes() const {
  return shape.what == Collective::kBarrier ? 0 : shape.count * dtype_size(shape.dtype);
}

OperationRecorder::OperationRecorder(int peers, std::size_t capacity)
    : capacity_(capacity),
      flows_each_(std::min(static_cast<std::size_t>(std::max(peers, 0)) * 2, kMostFlows)),
      flows_(std::make_unique<FlowRecord[]>(capacity_ * flows_each_)),
      entries_(std::make_unique<Entry[]>(capacity_)) {
  for (std::size_t i = 0; i < capacity_; ++i) {
    entries_[i].flows = flows_.get() + i * flows_each_;
    entries_[i].room = flows_each_;
  }
}

OperationRecorder::~OperationRecorder() = default;

OperationRecorder::Entry* OperationRecorder::begin(uint64_t group, const FlowIdentity& identity, Clock::time_point now,
                                                   int32_t call_site) {
  const uint64_t number = called_.load(kRelaxed) + 1;
  called_.store(number, kRelaxed);
  for (std::size_t tried = 0; tried < capacity_; ++tried) {
    Entry& entry = entries_[next_];
    next_ = next_ + 1 == capacity_ ? 0 : next_ + 1;
    if (entry.in_flight.load(std::memory_order_acquire)) continue;
    entry.number.store(0, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    const OperationShape& shape = identity.shape;
    entry.ended_number.store(0, kRelaxed);
    entry.group.store(group, kRelaxed);
    entry.sequence.store(identity.sequence, kRelaxed);
    entry.kind.store(static_cast<uint64_t>(shape.what) | static_cast<uint64_t>(shape.dtype) << 8 |
                         static_cast<uint64_t>(shape.op) << 16 | static_cast<uint64_t>(shape.algorithm) << 24 |
                         static_cast<uint64_t>(static_cast<uint32_t>(shape.root)) << 32,
                     kRelaxed);
    entry.count.store(shape.count, kRelaxed);
    entry.name_hash.store(shape.name_hash, kRelaxed);
    entry.call_site.store(call_site, kRelaxed);
    entry.state.store(OperationState::kQueued, kRelaxed);
    entry.queued_ns.store(nanoseconds_of(now), kRelaxed);
    entry.started_ns.store(0, kRelaxed);
    entry.ended_ns.store(0, kRelaxed);
    entry.flows_used.store(0, kRelaxed);
    entry.flows_left_out.store(0, kRelaxed);
    entry.set_name(identity.name);
    entry.in_flight.store(true, kRelaxed);
    entry.number.store(number, std::memory_order_release);
    return &entry;
  }
  return nullptr;
}

void OperationRecorder::start(Entry* entry, uint64_t sequence, Operation& operation, Clock::time_point now) {
  if (entry == nullptr) return;
  entry->sequence.store(sequence, kRelaxed);  // a message has got its number
  entry->started_ns.store(nanoseconds_of(now), kRelaxed);
  entry->state.store(OperationState::kStarted, kRelaxed);
  operation.record_flows_in({entry->flows, entry->room}, entry->flows_used, entry->flows_left_out);
}

void OperationRecorder::end(Entry* entry, bool failed) {
  if (entry == nullptr) return;
  const uint64_t number = ended_.load(kRelaxed) + 1;
  entry->ended_ns.store(nanoseconds_of(Clock::now()), kRelaxed);
  entry->state.store(failed ? OperationState::kFailed : OperationState::kDone, kRelaxed);
  entry->ended_number.store(number, std::memory_order_release);
  ended_.store(number, std::memory_order_release);
  entry->in_flight.store(false, std::memory_order_release);
}

bool OperationRecorder::read(const Entry& entry, OperationRecord& out) const {
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const uint64_t number = entry.number.load(std::memory_order_acquire);
    if (number == 0) {
      if (entry.queued_ns.load(kRelaxed) == 0) return false;  // never used
      continue;
    }
    out.number = number;
    // read before the values that are final once it is set
    out.ended_number = entry.ended_number.load(std::memory_order_acquire);
    out.group = entry.group.load(kRelaxed);
    out.sequence = entry.sequence.load(kRelaxed);
    const uint64_t kind = entry.kind.load(kRelaxed);
    out.shape.what = static_cast<Collective>(kind & 0xff);
    out.shape.dtype = static_cast<DType>(kind >> 8 & 0xff);
    out.shape.op = static_cast<ReduceOp>(kind >> 16 & 0xff);
    out.shape.algorithm = static_cast<uint8_t>(kind >> 24 & 0xff);
    out.shape.root = static_cast<int32_t>(kind >> 32);
    out.shape.count = entry.count.load(kRelaxed);
    out.shape.name_hash = entry.name_hash.load(kRelaxed);
    out.call_site = entry.call_site.load(kRelaxed);
    out.state = entry.state.load(kRelaxed);
    out.queued_ns = entry.queued_ns.load(kRelaxed);
    out.started_ns = entry.started_ns.load(kRelaxed);
    out.ended_ns = entry.ended_ns.load(kRelaxed);
    out.name = entry.read_name();
    out.flows_left_out = entry.flows_left_out.load(kRelaxed);
    out.flows.clear();
    const std::size_t used = std::min<std::size_t>(entry.flows_used.load(std::memory_order_acquire), entry.room);
    for (std::size_t i = 0; i < used; ++i) {
      const FlowRecord& flow = entry.flows[i];
      out.flows.push_back({.peer = flow.peer.load(kRelaxed),
                           .sends = flow.sends.load(kRelaxed),
                           .first_ns = flow.first_ns.load(kRelaxed),
                           .last_ns = flow.last_ns.load(kRelaxed),
                           .moved = flow.moved.load(kRelaxed),
                           .total = flow.total.load(kRelaxed),
                           .work_first_ns = flow.work_first_ns.load(kRelaxed),
                           .work_last_ns = flow.work_last_ns.load(kRelaxed),
                           .work_ns = flow.work_ns.load(kRelaxed)});
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.number.load(kRelaxed) == number) return true;
  }
  return false;
}

std::vector<OperationRecord> OperationRecorder::all() const {
  std::vector<OperationRecord> out;
  out.reserve(capacity_);
  OperationRecord record;
  for (std::size_t i = 0; i < capacity_; ++i)
    if (read(entries_[i], record)) out.push_back(record);
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return out;
}

std::vector<OperationRecord> OperationRecorder::ended_since(uint64_t& cursor, uint64_t& lost) const {
  const uint64_t upto = ended_.load(std::memory_order_acquire);
  lost = 0;
  if (upto <= cursor) return {};
  std::vector<OperationRecord> out;
  OperationRecord record;
  for (std::size_t i = 0; i < capacity_; ++i) {
    // Checked before the copy: most are older than the cursor.
    const uint64_t ended = entries_[i].ended_number.load(std::memory_order_acquire);
    if (ended <= cursor || ended > upto) continue;
    if (read(entries_[i], record) && record.ended_number == ended) out.push_back(record);
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.ended_number < b.ended_number; });
  lost = upto - cursor - out.size();
  cursor = upto;
  return out;
}

void OperationRecorder::add_group(uint64_t id, const std::string& name, const std::vector<int>& members) {
  MutexLock lock(mutex_);
  if (groups_.size() >= kMostGroups) {
    auto oldest = std::find_if(groups_.begin(), groups_.end(), [](const auto& group) { return group.removed; });
    groups_.erase(oldest == groups_.end() ? groups_.begin() : oldest);
  }
  groups_.push_back({id, name, members, false});
}

void OperationRecorder::remove_group(uint64_t id) {
  MutexLock lock(mutex_);
  for (RecordedGroup& group : groups_)
    if (group.id == id) group.removed = true;
}

void OperationRecorder::add_failure(RecordedFailure failure) {
  MutexLock lock(mutex_);
  if (failures_.size() >= kMostFailures) failures_.erase(failures_.begin());
  failures_.push_back(std::move(failure));
}

std::vector<RecordedGroup> OperationRecorder::groups() const {
  MutexLock lock(mutex_);
  return groups_;
}

std::vector<RecordedFailure> OperationRecorder::failures() const {
  MutexLock lock(mutex_);
  return failures_;
}

namespace {

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <typename Items, typename Format>
std::string list_of(const Items& items, const char* between, Format format) {
  std::string out;
  for (const auto& it : items) out += (out.empty() ? "" : between) + format(it);
  return "[" + out + "]";
}

std::string number(int64_t value) { return std::to_string(value); }

std::string field(const char* name, const std::string& value) { return json_text(name) + ":" + value; }

std::string flow_text(const FlowTimes& flow) {
  return "{" + field("peer", number(flow.peer)) + "," + field("sends", flow.sends ? "true" : "false") + "," +
         field("first_ns", number(flow.first_ns)) + "," + field("last_ns", number(flow.last_ns)) + "," +
         field("moved", std::to_string(flow.moved)) + "," + field("total", std::to_string(flow.total)) + "}";
}

std::string operation_text(const OperationRecord& it) {
  const char* order = (it.sequence & kMessageBit) != 0    ? "message"
                      : (it.sequence & kCallbackBit) != 0 ? "callback"
                                                          : "collective";
  std::string out = "{" + field("number", std::to_string(it.number));
  out += "," + field("group", json_text(std::to_string(it.group)));
  out += "," + field("sequence", std::to_string(it.sequence & ~(kMessageBit | kCallbackBit)));
  out += "," + field("order", json_text(order));
  out += "," + field("kind", json_text(std::string(collective_name(it.shape.what))));
  out += "," + field("dtype", json_text(std::string(dtype_name(it.shape.dtype))));
  out += "," + field("op", json_text(std::string(reduce_op_name(it.shape.op))));
  out += "," + field("root", number(it.shape.root));
  out += "," + field("count", std::to_string(it.shape.count));
  out += "," + field("bytes", std::to_string(it.bytes()));
  out += "," + field("text", json_text(it.shape.text()));
  if (!it.name.empty()) out += "," + field("name", json_text(it.name));
  out += "," + field("state", json_text(operation_state_name(it.state)));
  out += "," + field("queued_ns", number(it.queued_ns)) + "," + field("started_ns", number(it.started_ns)) + "," +
         field("ended_ns", number(it.ended_ns));
  if (it.call_site >= 0) out += "," + field("call_site", number(it.call_site));
  out += "," + field("flows", list_of(it.flows, ",", flow_text));
  if (it.flows_left_out > 0) out += "," + field("flows_left_out", std::to_string(it.flows_left_out));
  return out + "}";
}

std::string group_text(const RecordedGroup& it) {
  return "{" + field("id", json_text(std::to_string(it.id))) + "," + field("name", json_text(it.name)) + "," +
         field("members", list_of(it.members, ",", [](int member) { return number(member); })) + "," +
         field("removed", it.removed ? "true" : "false") + "}";
}

std::string failure_text(const RecordedFailure& it) {
  return "{" + field("at_ns", number(it.at_ns)) + "," + field("group", json_text(std::to_string(it.group))) + "," +
         field("sequence", std::to_string(it.sequence & ~(kMessageBit | kCallbackBit))) + "," +
         field("guilty", number(it.guilty)) + "," + field("kind", json_text(it.kind)) + "," +
         field("text", json_text(it.text)) + "}";
}

}  // namespace

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string dump_text(const OperationRecorder& recorder, const DumpHead& head) {
  const std::vector<OperationRecord> operations = recorder.all();
  std::set<int32_t> sites;
  for (const OperationRecord& it : operations)
    if (it.call_site >= 0) sites.insert(it.call_site);
  std::string out = "{" + field("format", "1");
  out += "," + field("rank", number(head.self.rank)) + "," + field("world", number(head.world)) + "," +
         field("host", json_text(head.self.host)) + "," + field("pid", number(head.self.pid));
  out += "," + field("reason", json_text(head.reason));
  out += "," + field("at_ns", number(nanoseconds_of(Clock::now()))) + "," + field("unix_ns", number(wall_clock_ns()));
  out += "," + field("called", std::to_string(recorder.called()));
  out += ",\n" + field("groups", list_of(recorder.groups(), ",\n", group_text));
  out += ",\n" + field("failures", list_of(recorder.failures(), ",\n", failure_text));
  std::string texts;
  for (const int32_t site : sites)
    texts += (texts.empty() ? "" : ",\n") + field(number(site).c_str(), json_text(call_site_text(site)));
  out += ",\n" + field("call_sites", "{" + texts + "}");
  out += ",\n" + field("stacks", json_text(head.stacks));
  out += ",\n" + field("operations", list_of(operations, ",\n", operation_text));
  return out + "}\n";
}

}  // namespace ringdp

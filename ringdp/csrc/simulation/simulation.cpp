#include "simulation/simulation.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "codec/plugin.h"
#include "collective/compressed_plan.h"
#include "collective/factory.h"
#include "collective/two_level.h"
#include "kernels/counting.h"

namespace ringdp {
namespace {

constexpr std::size_t kTurnBytes = 64 * 1024;        // of a pair, before the line serves the next one
constexpr std::size_t kSharedTurnBytes = 16 * 1024;  // the same where others wait: about a burst of packets
constexpr uint64_t kLookEvents = 1 << 16;
constexpr std::size_t kLineBytes = 64;  // parts of a buffer begin at multiples of 16 elements (Chunks)

const char* const kNoWork =
    "the operations of a simulation wait for one another for ever; report this as a bug of ringdp";

double pieces(double bytes, double each) { return std::max(1.0, std::ceil(bytes / each)); }

void refuse(const std::string& why) { throw Error(ErrorKind::kValue, "simulation: " + why); }

// Rank 0 is the root of a tree; all other algorithms treat hosts alike.
bool treats_hosts_alike(Algorithm algorithm) { return algorithm != Algorithm::kTree; }

bool all_alike(const SimulatedNetwork& network) {
  const SimulatedHost& first = network.hosts.front();
  return std::all_of(network.hosts.begin(), network.hosts.end(), [&](const SimulatedHost& it) {
    return it.ranks == first.ranks && it.site == first.site && it.up_bytes_per_s == first.up_bytes_per_s &&
           it.down_bytes_per_s == first.down_bytes_per_s;
  });
}

void check(const SimulatedNetwork& network, const SimulatedCall& call) {
  if (network.hosts.empty() || network.cores < 1) refuse("there must be a host, with a core");
  for (const SimulatedHost& it : network.hosts)
    if (it.ranks < 1 || it.site < 0 || !(it.up_bytes_per_s > 0) || !(it.down_bytes_per_s > 0))
      refuse("every host needs a rank, and links with a rate");
  const int ranks = network.hosts.front().ranks;
  if (call.algorithm == Algorithm::kHalving &&
      std::any_of(network.hosts.begin(), network.hosts.end(), [&](const auto& it) { return it.ranks != ranks; }))
    refuse("halving needs as many ranks on each host");
  if (call.bytes % dtype_size(call.dtype) != 0) refuse("the buffer must have whole elements");
  if (!call.memory.empty() && call.memory.size() != static_cast<std::size_t>(network.ranks()))
    refuse("memory for each rank or for none");
  if (call.algorithm == Algorithm::kCompressed && is_plugin(call.codec))
    refuse("codecs of users' libraries compute, which a simulation does not");
  if (call.algorithm == Algorithm::kCompressed && call.dtype != DType::kFloat32)
    refuse("compressed all-reduces are of float32");
}

}  // namespace

double Simulation::messages(const SimulatedNetwork& network, const SimulatedCall& call) {
  const auto n = static_cast<double>(network.ranks()), h = static_cast<double>(network.hosts.size());
  const double size = static_cast<double>(call.bytes), k = n / h;
  int most = 1;
  for (const SimulatedHost& it : network.hosts) most = std::max(most, it.ranks);
  constexpr double kBlock = 128 * 1024, kSegment = kSegmentBytes;
  switch (call.algorithm) {
    case Algorithm::kTree:
      return 2 * (n - 1) * pieces(size, kBlock);
    case Algorithm::kHalving:
      return 2 * n * (std::ceil(std::log2(n)) + pieces(size, kBlock));
    case Algorithm::kFold:
      return n * (n - 1) * pieces(size, kBlock);
    case Algorithm::kPairwise:
      return 2 * n * (n - 1) * pieces(size / n, kBlock);
    case Algorithm::kTwoLevel: {
      const double shares = two_level_shares(call.bytes, static_cast<int>(h), most);
      return h * shares * (2 * (k - 1) * h + 2 * (h - 1)) * pieces(size / shares / h, kBlock);
    }
    case Algorithm::kCompressed: {
      const bool alone = most == 1 || h == 1;
      const double hosts = alone ? n : h, local = alone ? 1 : k, part = size / hosts / local;
      const double segments = std::max(pieces(part, 252 * 1024), std::min(8.0, std::floor(part / 16384)));
      return hosts * local * hosts * (2 + 2 * (local - 1)) * segments;
    }
    default:
      return n * 2 * (n - 1) * pieces(size / n, kSegment);
  }
}

Simulation::Simulation(const SimulatedNetwork& network, SimulatedCall call)
    : network_(network),
      call_(std::move(call)),
      host_of_(network_.host_of_ranks()),
      memory_(2 * call_.bytes + (std::size_t{64} << 20)) {
  check(network_, call_);
  fold();
  double all = messages(network_, call_);
  if (folded_hosts_ > 1) all /= folded_hosts_;
  if (all > call_.most_messages) {
    const std::string name(algorithm_name(call_.algorithm));
    refuse(
        name + " of " + std::to_string(network_.ranks()) + " ranks sends about " +
        std::to_string(static_cast<uint64_t>(all / 1e6)) + " million messages, about as many seconds; the limit is " +
        std::to_string(static_cast<uint64_t>(call_.most_messages / 1e6)) + " million" +
        (folded_hosts_ > 1 ? "" : ". Where all hosts are alike, one stands for all: slow hosts and sites take more"));
  }
  make_lines();
}

Simulation::~Simulation() = default;

// Hosts that are alike do the same at the same time where all parts of the buffer are equal: what one sends to the host
// d places behind it, it gets at that moment from the host d places before it. So one of them is enough.
void Simulation::fold() {
  const auto hosts = static_cast<int>(network_.hosts.size());
  const bool possible = call_.memory.empty() && call_.weights.empty() && hosts > 2 && all_alike(network_) &&
                        !network_.one_machine && treats_hosts_alike(call_.algorithm);
  if (!possible || messages(network_, call_) < call_.fold_from_messages) return;
  folded_hosts_ = hosts;
  call_.bytes = bytes_to_fold();
}

std::size_t Simulation::bytes_to_fold() const {
  const auto hosts = network_.hosts.size(), ranks = host_of_.size();
  const auto up = [](std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; };
  const std::size_t line = kLineBytes / 4 * dtype_size(call_.dtype);
  const std::size_t least = std::max<std::size_t>(call_.bytes, 1);
  if (call_.algorithm == Algorithm::kFold) return up(least, line);
  if (call_.algorithm == Algorithm::kCompressed) return up(least, ranks * CompressedPlan::kUnit * sizeof(float));
  if (call_.algorithm != Algorithm::kTwoLevel) return up(least, ranks * line);
  const int per_host = network_.hosts.front().ranks;
  std::size_t bytes = least;
  for (int tries = 0; tries < 16; ++tries) {
    const int shares = two_level_shares(bytes, static_cast<int>(hosts), per_host);
    const std::size_t unit = hosts * line * static_cast<std::size_t>(shares);
    if (bytes % unit == 0) break;
    bytes = up(bytes, unit);
  }
  return bytes;
}

void Simulation::make_lines() {
  const std::size_t hosts = folded_hosts_ > 1 ? 1 : network_.hosts.size();
  int sites = 0;
  for (std::size_t i = 0; i < hosts; ++i) {
    const SimulatedHost& it = network_.hosts[i];
    sites = std::max(sites, it.site + 1);
    up_.emplace_back(CriticalPath::kUplinks, it.up_bytes_per_s, network_.burst_bytes);
    down_.emplace_back(CriticalPath::kDownlinks, it.down_bytes_per_s, network_.burst_bytes);
    host_memory_.emplace_back(CriticalPath::kMemory, network_.memory_bytes_per_s);
    cores_.emplace_back().free = network_.cores;
  }
  for (int site = 0; site < sites; ++site) {
    site_up_.emplace_back(CriticalPath::kSiteLines, network_.site_bytes_per_s);
    site_down_.emplace_back(CriticalPath::kSiteLines, network_.site_bytes_per_s);
  }
}

std::unique_ptr<Operation> Simulation::make_operation(int rank) {
  GroupView group;
  group.rank = rank;
  group.size = static_cast<int>(host_of_.size());
  group.members.resize(host_of_.size());
  std::iota(group.members.begin(), group.members.end(), 0);
  if (call_.algorithm != Algorithm::kTree) group.hosts = host_of_;  // 10,000 ranks have 10,000 lists
  group.far = call_.far;
  group.weights = call_.weights;
  if (call_.barrier) return make_barrier(group, "");
  std::span<std::byte> memory = memory_.span().first(call_.bytes);
  if (!call_.memory.empty()) memory = call_.memory[static_cast<std::size_t>(rank)];
  if (call_.algorithm == Algorithm::kCompressed) {
    auto* const x = reinterpret_cast<float*>(memory.data());
    return make_all_reduce_compressed(group, {{.x = x, .count = memory.size() / sizeof(float)}},
                                      {.codec = call_.codec, .divisor = host_of_.size()}, nullptr, "");
  }
  const auto all = all_reduces();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const AllReduceAlgorithm* it) { return it->id == call_.algorithm; });
  if (found == all.end()) refuse(std::string(algorithm_name(call_.algorithm)) + " is not an all-reduce");
  OperationShape shape;
  shape.what = Collective::kAllReduce;
  shape.dtype = call_.dtype;
  shape.op = ReduceOp::kSum;
  shape.algorithm = static_cast<uint8_t>(call_.algorithm);
  shape.count = memory.size() / dtype_size(call_.dtype);
  return (*found)->make(group, shape, "", memory);
}

void Simulation::make_ranks() {
  std::byte* const nowhere = call_.memory.empty() ? memory_.span().data() : nullptr;
  const std::size_t count =
      folded_hosts_ > 1 ? static_cast<std::size_t>(network_.hosts.front().ranks) : host_of_.size();
  for (std::size_t rank = 0; rank < count; ++rank) {
    const std::size_t host = network_.one_machine ? 0 : static_cast<std::size_t>(host_of_[rank]);
    ranks_.push_back(std::make_unique<SimulatedRank>(*this, static_cast<int>(rank), cores_[host], nowhere));
  }
  unfinished_ = ranks_.size();
}

SimulatedResult Simulation::run(const std::function<void()>& look) {
  std::optional<CountedWork> counted;
  if (call_.memory.empty()) counted.emplace();
  SimulatedResult result;
  if (host_of_.size() > 1) {
    make_ranks();
    for (auto& rank : ranks_) {
      rank->begin(make_operation(rank->member()));
      if (rank->member() % 64 == 0) look();
    }
    while (!queue_.empty()) {
      const Event event = queue_.top();
      queue_.pop();
      now_ = event.time;
      handle(event);
      if (++events_ % kLookEvents == 0) look();
    }
    if (unfinished_ > 0) {
      const auto stuck = std::find_if(ranks_.begin(), ranks_.end(), [](const auto& it) { return !it->finished(); });
      throw Error(ErrorKind::kSystem, std::string(kNoWork) + ": rank " + std::to_string((*stuck)->member()) +
                                          " waits for " + (*stuck)->waiting_for());
    }
  }
  for (const auto& rank : ranks_) {
    result.finish_s.push_back(rank->finished_at());
    result.messages.push_back(rank->messages());
  }
  result.seconds = last_path_.total();
  result.path = last_path_;
  result.folded_hosts = folded_hosts_;
  result.bytes = call_.bytes;
  for (const SimulatedLine& line : up_) result.up.push_back(line.traffic);
  for (const SimulatedLine& line : down_) result.down.push_back(line.traffic);
  for (const SimulatedLine& line : site_up_) result.site_up.push_back(line.traffic);
  result.events = events_;
  ranks_.clear();
  return result;
}

void Simulation::rank_finished(const CriticalPath& path) {
  --unfinished_;
  if (unfinished_ == 0) last_path_ = path;
}

void Simulation::add_event(double time, EventKind kind, void* of, uint32_t body) {
  queue_.push({time, ++event_number_, kind, body, of});
}

uint32_t Simulation::add_chunk(const Chunk& chunk) {
  if (free_chunks_.empty()) {
    chunks_.push_back(chunk);
    return static_cast<uint32_t>(chunks_.size() - 1);
  }
  const uint32_t at = free_chunks_.back();
  free_chunks_.pop_back();
  chunks_[at] = chunk;
  return at;
}

SimulatedMessage* Simulation::new_message() {
  if (free_messages_.empty()) {
    messages_.push_back(std::make_unique<SimulatedMessage>());
    return messages_.back().get();
  }
  SimulatedMessage* const it = free_messages_.back();
  free_messages_.pop_back();
  *it = {};
  return it;
}

void Simulation::free_message(SimulatedMessage* message) { free_messages_.push_back(message); }

void Simulation::handle(const Event& event) {
  switch (event.kind) {
    case EventKind::kWorkEnds:
      return static_cast<SimulatedRank*>(event.of)->work_ends();
    case EventKind::kLineFree:
      return line_free(*static_cast<SimulatedLine*>(event.of));
    case EventKind::kArrives:
      return arrives(event.body);
  }
}

std::pair<SimulatedRank*, int> Simulation::receiver(int from, int to) {
  if (folded_hosts_ <= 1) return {ranks_[static_cast<std::size_t>(to)].get(), from};
  const int per_host = static_cast<int>(ranks_.size()), distance = host_of(to) - host_of(from);
  const int host = (folded_hosts_ - distance) % folded_hosts_;  // seen from the host that stands for all
  return {ranks_[static_cast<std::size_t>(to % per_host)].get(), host * per_host + from % per_host};
}

// The line of a host, of which one may stand for all.
SimulatedLine& Simulation::of_host(std::vector<SimulatedLine>& lines, int host) {
  return lines[folded_hosts_ > 1 ? 0 : static_cast<std::size_t>(host)];
}

void Simulation::transmit(SimulatedMessage* message) {
  SimulatedPeer& from = *message->from;
  std::tie(message->to, message->taken_for) = receiver(from.rank->member(), from.member);
  if (from.within_host) return message->to->take(message, message->wire_bytes, true, message->path);
  message->wire_left = message->wire_bytes;
  message->from_host = host_of(from.rank->member());
  message->to_host = host_of(from.member);
  from.waiting.push_back(message);
  if (from.waiting.size() > 1) return;
  SimulatedLine& line = of_host(up_, message->from_host);
  line.turns.push_back(&from);
  if (line.serving_bytes == 0) serve(line, true);
}

void Simulation::serve(SimulatedLine& line, bool was_idle) {
  if (line.turns.empty()) return;
  const SimulatedMessage& message = *line.turns.front()->waiting.front();
  const std::size_t turn = line.turns.size() > 1 ? kSharedTurnBytes : kTurnBytes;
  line.serving_bytes = message.wire_left < turn + turn / 2 ? message.wire_left : turn;  // no turn for a little rest
  const double wire = static_cast<double>(line.serving_bytes) * network_.wire_bytes_per_byte;
  const double seconds = line.pass(now_, now_, wire) - now_;
  if (was_idle) line.last = message.path;
  line.last.seconds[line.part] += seconds;
  line.traffic.bytes += line.serving_bytes;
  line.traffic.busy_s += wire / line.bytes_per_s;
  add_event(now_ + seconds, EventKind::kLineFree, &line);
}

// A part of the first pair's message has left the host.
void Simulation::line_free(SimulatedLine& line) {
  SimulatedPeer& from = *line.turns.front();
  SimulatedMessage* const message = from.waiting.front();
  const std::size_t bytes = std::exchange(line.serving_bytes, 0);
  message->wire_left -= bytes;
  const bool last = message->wire_left == 0;
  const double latency =
      site_of(*message, true) == site_of(*message, false) ? network_.latency_s : network_.latency_between_sites_s;
  Chunk chunk{message, bytes, last, 1, line.bytes_per_s, line.last};
  chunk.path.seconds[CriticalPath::kLatency] += latency;
  add_event(now_ + latency, EventKind::kArrives, nullptr, add_chunk(chunk));
  line.turns.pop_front();
  if (last) from.waiting.pop_front();
  if (!from.waiting.empty()) line.turns.push_back(&from);
  const CriticalPath path = line.last;
  serve(line, false);
  from.rank->room(from, bytes, path);
}

int Simulation::site_of(const SimulatedMessage& message, bool sender) const {
  const int host = sender ? message.from_host : message.to_host;
  return network_.hosts[static_cast<std::size_t>(host)].site;
}

// The last byte of a part of a message has come to a line, or to its receiver. A line begins with the first byte.
void Simulation::arrives(uint32_t at) {
  Chunk& chunk = chunks_[at];
  const SimulatedMessage& message = *chunk.message;
  const bool far = site_of(message, true) != site_of(message, false);
  SimulatedLine* line = nullptr;
  if (far && chunk.hop == 1) line = &site_up_[static_cast<std::size_t>(site_of(message, true))];
  if (far && chunk.hop == 2) line = &site_down_[static_cast<std::size_t>(site_of(message, false))];
  if (chunk.hop == (far ? 3 : 1)) line = &of_host(down_, message.to_host);
  if (line == nullptr) return deliver(at);
  const double wire = static_cast<double>(chunk.bytes) * network_.wire_bytes_per_byte;
  const double first = now_ - wire / chunk.sent_bytes_per_s;
  const bool queued = line->free_s > first;
  const double end = line->pass(first, now_, wire);
  if (end > now_) {
    if (queued) chunk.path = line->last;
    // of the time on the line before, what this one repeats
    chunk.path.seconds[line->part] += end - chunk.path.total();
  }
  line->last = chunk.path;
  line->traffic.bytes += chunk.bytes;
  line->traffic.busy_s += wire / line->bytes_per_s;
  chunk.sent_bytes_per_s = line->bytes_per_s;
  ++chunk.hop;
  add_event(end, EventKind::kArrives, nullptr, at);
}

void Simulation::deliver(uint32_t at) {
  const Chunk chunk = chunks_[at];
  free_chunks_.push_back(at);
  chunk.message->to->take(chunk.message, chunk.bytes, chunk.last, chunk.path);
}

// How much longer a copy takes because the host's memory is busy.
double Simulation::wait_for_memory(const SimulatedRank& rank, std::size_t bytes, double seconds) {
  SimulatedLine& memory = of_host(host_memory_, host_of(rank.member()));
  const double busy = 2 * static_cast<double>(bytes) / memory.bytes_per_s;  // it is read and written
  memory.free_s = std::max(memory.free_s, now_) + busy;
  return std::max(0.0, memory.free_s - now_ - seconds);
}

}  // namespace ringdp

#include "shared/pair_setup.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/sha256.h"
#include "transport/shm.h"

namespace ringdp {
namespace {

constexpr int kConnectAgainMs = 5;

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

// Why the process at the other end of a Unix socket is not the peer; empty: it is.
std::string stranger_text(const PairSetup::Terms& terms, const ucred& credentials) {
  const std::string who = rank_text(terms.peer), me = rank_text(terms.self);
  if (credentials.uid != geteuid())
    return who + " runs as another user than " + me + " (" + std::to_string(credentials.uid) + " and " +
           std::to_string(geteuid()) + ", as " + me + " sees it)";
  if (terms.pid < 0 || credentials.pid == terms.pid) return "";
  return "process " + std::to_string(credentials.pid) + " came in the place of " + who + ", which is process " +
         std::to_string(terms.pid);
}

}  // namespace

PairSetup::PairSetup(const Terms& terms, PeerSocket tcp, std::vector<Fd> streams)
    : terms_(terms),
      connected_(true),
      tcp_(std::move(tcp)),
      streams_(std::move(streams)),
      tcp_reader_(SharedMac::receiving(tcp_.protection)),
      tcp_mac_(SharedMac::sending(tcp_.protection)) {}

int PairSetup::poll_for(std::vector<pollfd>& polled, int wait_ms) const {
  if (stage_ == Stage::kConnecting) wait_ms = std::min(wait_ms, kConnectAgainMs);
  if (stage_ == Stage::kAwaitMemory) wait_ms = deadline_.remaining_ms(wait_ms);
  if (!cut_ && !shares()) {
    polled.push_back({tcp_.get(), POLLIN, 0});
    for (const Fd& it : streams_) polled.push_back({it.get(), POLLRDHUP, 0});
  }
  if (unix_socket_ && stage_ != Stage::kConnecting) polled.push_back({unix_socket_.get(), POLLIN, 0});
  return wait_ms;
}

void PairSetup::watch_for_end(std::vector<pollfd>& polled) const {
  if (cut_ || shares()) return;
  polled.push_back({tcp_.get(), POLLRDHUP, 0});
  for (const Fd& it : streams_) polled.push_back({it.get(), POLLRDHUP, 0});
}

void PairSetup::reconnect(PeerSocket tcp, std::vector<Fd> streams) {
  tcp_ = std::move(tcp);
  streams_ = std::move(streams);
  tcp_reader_ = SharedReader(SharedMac::receiving(tcp_.protection));
  tcp_mac_ = SharedMac::sending(tcp_.protection);
  cut_ = false;
  const bool lower = terms_.self < terms_.peer;
  if (lower && stage_ == Stage::kAwaitAnswer) say(offer_);
  if (negotiates_ && decided() && !memory_) say({.type = SharedType::kRefused, .reason = problem_});
}

// Both directions: the other end may not have seen the end.
void PairSetup::end_tcp() {
  cut_ = true;
  shutdown(tcp_.get(), SHUT_RDWR);
  for (const Fd& it : streams_) shutdown(it.get(), SHUT_RDWR);
}

void PairSetup::move_on() {
  if (stage_ == Stage::kConnecting) connect();
  if ((stage_ == Stage::kAwaitMemory || stage_ == Stage::kConnecting) && deadline_.expired())
    refuse(rank_text(terms_.peer) + " did not hand the memory out in time");
}

// ---- The lower rank ----

void PairSetup::offer(FdSocket& fd_socket) {
  std::string problem;
  handout_ = PairMemory::create(terms_.ring_bytes, problem);
  if (handout_) memory_ = PairMemory::map(handout_, terms_.ring_bytes, problem);
  if (!memory_) return fail(problem);
  offer_.type = SharedType::kOffer;
  offer_.ring_bytes = terms_.ring_bytes;
  offer_.name = fd_socket.name();
  random_bytes(offer_.token);
  fd_socket.expect(offer_.token, terms_.peer);
  negotiates_ = true;
  stage_ = Stage::kAwaitAnswer;
  say(offer_);
}

void PairSetup::hand_out(FdSocket::Client client) {
  if (stage_ != Stage::kAwaitAnswer) return;  // the pair was settled meanwhile
  SharedMessage reply;
  reply.type = SharedType::kMemory;
  reply.reason = stranger_text(terms_, client.credentials);
  if (reply.reason.empty()) {
    int error_number = send_shared_message(client.socket.get(), reply, handout_);
    handout_.reset();
    unix_socket_ = std::move(client.socket);
    if (error_number == 0) return;
    reply.reason = rank_text(terms_.self) + ": handing the memory over: " + errno_text(error_number);
    client.socket = std::move(unix_socket_);
  }
  reply.type = SharedType::kRefused;
  send_shared_message(client.socket.get(), reply);  // if that fails too, the peer sees the end of the connection
}

// ---- The higher rank ----

void PairSetup::await_offer() {
  negotiates_ = true;
  stage_ = Stage::kAwaitOffer;
}

void PairSetup::on_offer() {
  std::size_t bytes = offer_.ring_bytes;
  if (!std::has_single_bit(bytes) || bytes < PairMemory::kMinRingBytes || bytes > PairMemory::kMaxRingBytes)
    return report(false, "it offered to share rings of " + std::to_string(bytes) + " bytes");
  stage_ = Stage::kConnecting;
  deadline_ = Deadline::after_ms(terms_.patience_ms);
  connect();
}

void PairSetup::connect() {
  int error_number = 0;
  unix_socket_ = connect_fd_socket(offer_.name, error_number);
  if (!unix_socket_ && (error_number == EAGAIN || error_number == EINTR)) return;  // its backlog is full
  if (!unix_socket_) return fail("a Unix socket: " + errno_text(error_number));
  std::string problem = stranger_text(terms_, credentials_of(unix_socket_.get()));
  if (!problem.empty()) return refuse(problem);
  SharedMessage message;
  message.type = SharedType::kToken;
  message.token = offer_.token;
  error_number = send_shared_message(unix_socket_.get(), message);
  if (error_number != 0) return fail("a Unix socket: " + errno_text(error_number));
  stage_ = Stage::kAwaitMemory;
}

void PairSetup::on_memory(const SharedMessage& reply) {
  Fd memory = unix_reader_.take_descriptor();
  if (reply.type == SharedType::kRefused) return refuse(reply.reason);
  if (reply.type != SharedType::kMemory) return refuse(rank_text(terms_.peer) + " answered something else than memory");
  if (!memory) return fail("the memory's descriptor did not come through (ulimit -n, or a security module?)");
  std::string problem;
  memory_ = PairMemory::map(memory, offer_.ring_bytes, problem);
  if (!memory_) return fail(problem);
  if (int error_number = send_shared_message(unix_socket_.get(), {.type = SharedType::kAccepted}); error_number != 0)
    return fail("a Unix socket: " + errno_text(error_number));
  use_memory();
}

// ---- Both ----

std::optional<SharedMessage> PairSetup::receive(int fd) {
  return fd == unix_socket_.get() ? receive_unix() : fd == tcp_.get() && !cut_ ? receive_tcp() : std::nullopt;
}

std::optional<SharedMessage> PairSetup::given_up_or(const SharedMessage& message) {
  auto why = GivenUp::from(message);
  if (!why) return message;
  report(true, "it gave up");
  failure_->given_up = std::move(why);
  return std::nullopt;
}

std::optional<SharedMessage> PairSetup::receive_tcp() {
  switch (tcp_reader_.read(tcp_.get())) {
    case SharedReader::Status::kWaiting:
      return std::nullopt;
    case SharedReader::Status::kClosed:
      end_tcp();
      // A peer that has accepted the memory closes this connection as soon as all are ready; it has sent kAccepted
      // before.
      return stage_ == Stage::kAwaitAnswer && unix_socket_ ? receive_unix() : std::nullopt;
    case SharedReader::Status::kNonsense:
      report(false, "it sent something that is not part of the set-up");
      return std::nullopt;
    case SharedReader::Status::kMessage:
      break;
  }
  const auto message = given_up_or(tcp_reader_.message());
  if (!message) return std::nullopt;
  const bool offered = terms_.peer < terms_.self && negotiates_ && stage_ != Stage::kAwaitOffer &&
                       message->type == SharedType::kOffer && message->token == offer_.token;
  const bool refused = message->type == SharedType::kRefused && negotiates_ && decided() && !memory_;
  if (offered || refused) return std::nullopt;  // a repetition, after a connection that has ended
  if (decided()) return message;
  on_message(*message);
  return std::nullopt;
}

std::optional<SharedMessage> PairSetup::receive_unix() {
  const SharedReader::Status status = unix_reader_.read(unix_socket_.get());
  if (status == SharedReader::Status::kWaiting) return std::nullopt;
  const bool message = status == SharedReader::Status::kMessage;
  if (shares()) {
    if (message) return given_up_or(unix_reader_.message());
    report(status == SharedReader::Status::kClosed, message ? "" : unix_reader_.why());
  } else if (stage_ == Stage::kAwaitMemory) {
    if (message)
      on_memory(unix_reader_.message());
    else
      refuse(rank_text(terms_.peer) + " did not hand the memory out: " + unix_reader_.why());
  } else if (message && unix_reader_.message().type == SharedType::kAccepted) {
    use_memory();
  } else {
    unix_socket_.reset();  // the peer refuses, and sends the reason on the other connection
  }
  return std::nullopt;
}

void PairSetup::on_message(const SharedMessage& message) {
  if (stage_ == Stage::kAwaitOffer && message.type == SharedType::kOffer) {
    offer_ = message;
    return on_offer();
  }
  if ((stage_ == Stage::kAwaitOffer || stage_ == Stage::kAwaitAnswer) && message.type == SharedType::kRefused)
    return use_fallback(message.reason);
  out_of_turn(message);
}

void PairSetup::out_of_turn(const SharedMessage& message) {
  report(false, "it sent a message out of turn (" + std::to_string(static_cast<int>(message.type)) + ")");
}

void PairSetup::say(const SharedMessage& message) {
  // 256 bytes, three of them at most, always fit into a fresh socket's buffer.
  if (shares()) {
    if (int error_number = send_shared_message(unix_socket_.get(), message); error_number != 0)
      report(true, errno_text(error_number));
  } else if (!cut_ && send_shared_message(tcp_.get(), message, tcp_mac_) != 0) {
    end_tcp();
  }
}

void PairSetup::fail(const std::string& problem) { refuse(rank_text(terms_.self) + ": " + problem); }

void PairSetup::refuse(const std::string& reason) {
  negotiates_ = true;
  SharedMessage message;
  message.reason = reason;
  use_fallback(SharedMessage::decode(message.encode())->reason);  // cut as the peer's text is
  say(message);
}

void PairSetup::use_fallback(const std::string& reason) {
  stage_ = Stage::kDecided;
  problem_ = reason.empty() ? "no reason was given" : reason;
  handout_.reset();
  memory_.reset();
  unix_socket_.reset();
}

void PairSetup::use_memory() {
  stage_ = Stage::kDecided;
  handout_.reset();
}

void PairSetup::report(bool lost, const std::string& text) {
  if (!failure_) failure_ = Failure{terms_.peer, lost, text};
}

std::unique_ptr<Channel> PairSetup::take(const Transport& without_memory) {
  connected_ = false;
  if (!memory_) return open_channel(without_memory, std::move(tcp_), std::move(streams_));
  tcp_ = {};
  int side = terms_.peer > terms_.self ? 0 : 1;
  return make_shm_channel({std::move(*memory_), std::move(unix_socket_), side, rank_text(terms_.peer)});
}

}  // namespace ringdp

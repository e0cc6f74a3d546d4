#include "meet/handshake_attempt.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/sha256.h"
#include "meet/handshake.h"
#include "transport/striped.h"

namespace ringdp {
namespace {

constexpr int64_t kStrangerMs = 2000;  // how long each may take to prove itself
constexpr int64_t kTurnMs = 4000;      // for the peer to say hello on a connection that has knocked
constexpr int kLooksLostMs = 3000;     // left of its patience: padding that has not come by then is lost

bool connection_refused(int error_number) { return error_number == ECONNREFUSED; }

}  // namespace

HandshakeFields HandshakeSelf::fields(HandshakeType type, int peer) const {
  HandshakeFields out = mine;
  out.type = type;
  out.from = mine.to;
  out.to = static_cast<uint32_t>(peer);
  random_bytes(out.nonce);
  if (type == HandshakeType::kHello) std::copy(instance.begin(), instance.end(), out.nonce.begin());
  return out;
}

HandshakeAttempt::HandshakeAttempt(const HandshakeSelf& self, Facts dialled) : facts_(std::move(dialled)) {
  facts_.dialled = true;
  if (const int64_t ms = self.patience.connecting_ms; ms > 0)
    deadline_ = Deadline::after_ms(ms);
  else if (facts_.stream > 0)
    await_answer(self);
  int error_number = 0;
  socket_ = HandshakeSocket(start_connect(facts_.address, error_number));
  if (error_number != 0) fail(errno_text(error_number), connection_refused(error_number));
}

HandshakeAttempt::HandshakeAttempt(Fd accepted, const SocketAddress& from)
    : socket_(std::move(accepted)), stage_(Stage::kAwaitHello), deadline_(Deadline::after_ms(kStrangerMs)) {
  facts_.address = from;
}

bool HandshakeAttempt::lacks_padding() const {
  return stage_ == Stage::kAwaitPadding && deadline_.remaining_ms(kLooksLostMs + 1) <= kLooksLostMs;
}

void HandshakeAttempt::fail(const std::string& why, bool refused, bool final) {
  failure_ = Failure{.why = why, .refused = refused, .final = final};
  close();
}

void HandshakeAttempt::close() {
  stage_ = Stage::kClosed;
  socket_.close();
}

void HandshakeAttempt::await_answer(const HandshakeSelf& self) {
  deadline_ = Deadline::after_ms(facts_.stream > 0 ? self.patience.stream_ms : self.patience.answer_ms);
}

void HandshakeAttempt::expire(const HandshakeSelf& self) {
  if (over() || !deadline_.expired()) return;
  if (stage_ == Stage::kAwaitResume) return fail("the new connection does not move");
  if (stage_ != Stage::kAwaitPadding)
    return fail(!self.resumes()                ? "it did not answer in time"
                : stage_ == Stage::kConnecting ? "Connection timed out"
                                               : "connected, but it did not answer");
  const std::string bytes = std::to_string(socket_.padding());
  const std::string connection = connection_text(socket_.fd());
  fail("connected, but a packet with " + bytes + " bytes does not arrive", false, true);
  failure_->large = connection + ": a packet with " + bytes + " bytes did not arrive within " +
                    std::to_string(self.patience.padding_ms / 1000) + " s, short ones did";
}

HandshakeAttempt::Event HandshakeAttempt::advance(const HandshakeSelf& self) {
  if (stage_ == Stage::kConnecting) {
    const int error_number = connect_error(socket_.fd());
    if (error_number == 0 && socket_.send_first(facts_.address.greeting())) return Event::kConnected;
    fail(error_number != 0 ? errno_text(error_number) : socket_.why(), connection_refused(error_number));
    return Event::kNone;
  }
  const bool padding = stage_ == Stage::kAwaitPadding;
  // A connection that closes without a message came from a rank that connected by another address, or was a probe.
  const bool may_be_silent = stage_ == Stage::kAwaitHello && !socket_.begun();
  switch (padding ? socket_.read_padding() : socket_.read_message()) {
    case HandshakeSocket::Read::kWaits:
      return Event::kNone;
    case HandshakeSocket::Read::kEnded:
      fail(may_be_silent && socket_.error_number() == 0 ? "" : socket_.why(),
           connection_refused(socket_.error_number()));
      return Event::kNone;
    case HandshakeSocket::Read::kDone:
      break;
  }
  switch (stage_) {
    case Stage::kAwaitPadding:
      return on_padding(self);
    case Stage::kAwaitReply:
      return on_reply(self);
    case Stage::kAwaitHello:
      return on_hello(self);
    case Stage::kAwaitConfirm:
      return on_confirm(self);
    case Stage::kAwaitResume:
      return on_resume(self);
    default:
      return Event::kNone;
  }
}

bool HandshakeAttempt::send(const HandshakeSelf& self, HandshakeFields fields) {
  fields.stream = static_cast<uint16_t>(facts_.stream);
  fields.streams = static_cast<uint16_t>(facts_.streams);
  if (fields.type != HandshakeType::kResume) fields.number = facts_.number;
  if (socket_.send(fields, self.secret)) return true;
  fail(socket_.why());
  return false;
}

HandshakeAttempt::Event HandshakeAttempt::await_padding(const HandshakeSelf& self, std::size_t bytes) {
  if (!socket_.announced(bytes)) {
    fail("it announced padding of " + std::to_string(bytes) + " bytes", false, true);
    return Event::kNone;
  }
  stage_ = Stage::kAwaitPadding;
  if (self.patience.padding_ms > 0) deadline_ = Deadline::after_ms(self.patience.padding_ms);
  return bytes == 0 ? on_padding(self) : advance(self);
}

// All of it has come.
HandshakeAttempt::Event HandshakeAttempt::on_padding(const HandshakeSelf& self) {
  if (facts_.dialled) return Event::kProven;
  if (self.resumes()) return Event::kConfirmed;
  stage_ = Stage::kDone;
  return Event::kNone;
}

// ---- The side that has dialled ----

bool HandshakeAttempt::knock(const HandshakeSelf& self, uint64_t number) {
  facts_.number = number;
  HandshakeFields fields = self.fields(HandshakeType::kKnock, facts_.peer);
  fields.turned = self.turns;
  if (!send(self, fields)) return false;
  if (!self.turns) {
    close();
    return true;
  }
  facts_.dialled = false;
  facts_.turned = true;
  stage_ = Stage::kAwaitHello;
  deadline_ = Deadline::after_ms(kTurnMs);
  return true;
}

void HandshakeAttempt::turn(int peer) {
  facts_.peer = peer;
  facts_.dialled = facts_.turned = true;
}

void HandshakeAttempt::greet(const HandshakeSelf& self, uint64_t number) {
  facts_.number = number;
  await_answer(self);
  if (send(self, self.fields(HandshakeType::kHello, facts_.peer))) stage_ = Stage::kAwaitReply;
}

HandshakeAttempt::Event HandshakeAttempt::on_reply(const HandshakeSelf& self) {
  const auto reply = socket_.decode(self.secret);
  if (!reply) {
    fail("the process there does not belong to this job (another secret?)", false, true);
    failure_->foreign = true;
  } else if (reply->type == HandshakeType::kRefusal) {
    on_refusal(self, *reply);
  } else if (reply->type != HandshakeType::kReply || reply->from != static_cast<uint32_t>(facts_.peer) ||
             reply->to != self.mine.to) {
    fail("it answered as another rank", false, true);
  } else {
    socket_.add_to_transcript();
    facts_.met = reply->met;
    return await_padding(self, reply->padding);
  }
  return Event::kNone;
}

void HandshakeAttempt::on_refusal(const HandshakeSelf& self, const HandshakeFields& refusal) {
  const std::string why = refusal_text(refusal.refusal, refusal, self.mine);
  fail(self.resumes() ? why : "refused: " + why, false, true);
  failure_->refusal = refusal.refusal;
}

void HandshakeAttempt::confirm(const HandshakeSelf& self, int streams) {
  facts_.streams = streams;
  HandshakeFields fields = self.fields(HandshakeType::kConfirm, facts_.peer);
  fields.padding = padding_for(socket_.fd());
  if (!send(self, fields)) return;
  stage_ = Stage::kDone;
  if (self.resumes() && facts_.stream == 0) await_resume(self);
}

// ---- The side that was dialled ----

HandshakeAttempt::Event HandshakeAttempt::on_hello(const HandshakeSelf& self) {
  const auto hello = socket_.decode(self.secret);
  if (!hello || (hello->type != HandshakeType::kHello && hello->type != HandshakeType::kKnock)) {
    fail("no hello");
    return Event::kNone;
  }
  socket_.add_to_transcript();
  facts_.hello = *hello;
  return Event::kHello;
}

void HandshakeAttempt::reply(const HandshakeSelf& self) {
  facts_.peer = static_cast<int>(facts_.hello.from);
  facts_.stream = facts_.hello.stream;
  facts_.number = facts_.hello.number;
  await_answer(self);
  HandshakeFields fields = self.fields(HandshakeType::kReply, facts_.peer);
  fields.padding = padding_for(socket_.fd());
  if (send(self, fields)) stage_ = Stage::kAwaitConfirm;
}

void HandshakeAttempt::refuse(const HandshakeSelf& self, Refusal verdict) {
  const int peer = facts_.peer >= 0 ? facts_.peer : static_cast<int>(facts_.hello.from);
  HandshakeFields fields = self.fields(HandshakeType::kRefusal, peer);
  fields.refusal = verdict;
  if (send(self, fields)) close();
}

HandshakeAttempt::Event HandshakeAttempt::on_confirm(const HandshakeSelf& self) {
  const auto confirm = socket_.decode(self.secret);
  if (confirm && confirm->type == HandshakeType::kRefusal) {
    on_refusal(self, *confirm);
  } else if (!confirm || confirm->type != HandshakeType::kConfirm) {
    fail("a handshake was replayed");
  } else if (confirm->streams < 1 || confirm->streams > kMostStreams) {
    fail("it announced " + std::to_string(confirm->streams) + " connections", false, true);
  } else {
    socket_.add_to_transcript();
    facts_.streams = confirm->streams;
    return await_padding(self, confirm->padding);
  }
  return Event::kNone;
}

// ---- Either side of a connection that replaces a broken one ----

void HandshakeAttempt::await_resume(const HandshakeSelf& self) {
  stage_ = Stage::kAwaitResume;
  deadline_ = Deadline::after_ms(self.patience.resume_ms);
}

bool HandshakeAttempt::resume(const HandshakeSelf& self, uint64_t frames_taken) {
  HandshakeFields fields = self.fields(HandshakeType::kResume, facts_.peer);
  fields.number = frames_taken;
  return send(self, fields);
}

HandshakeAttempt::Event HandshakeAttempt::on_resume(const HandshakeSelf& self) {
  const auto message = socket_.decode(self.secret);
  if (message && message->type == HandshakeType::kRefusal) {
    on_refusal(self, *message);
  } else if (!message || message->type != HandshakeType::kResume) {
    fail(message ? "it sent an invalid message" : "a handshake was replayed");
  } else {
    socket_.add_to_transcript();
    facts_.frames_taken = message->number;
    return Event::kResumed;
  }
  return Event::kNone;
}

// ---- Several ----

void poll_for(const HandshakeAttempts& attempts, std::vector<pollfd>& polled) {
  for (const HandshakeAttempt& it : attempts)
    polled.push_back(
        {it.fd(), static_cast<short>(it.stage() == HandshakeAttempt::Stage::kConnecting ? POLLOUT : POLLIN), 0});
}

bool lack_padding(const HandshakeAttempts& attempts, int peer) {
  return std::any_of(attempts.begin(), attempts.end(),
                     [&](const HandshakeAttempt& it) { return it.facts().peer == peer && it.lacks_padding(); });
}

}  // namespace ringdp

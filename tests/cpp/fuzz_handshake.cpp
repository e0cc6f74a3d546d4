// What may come to a rank that meets others: handshake messages at both ends, and what stands in the store.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "fuzz.h"
#include "meet/addresses.h"
#include "meet/connector.h"
#include "meet/store.h"

namespace ringdp::fuzz {
namespace {

const std::vector<std::byte> kSecret(32, std::byte{7});
constexpr uint32_t kWorld = 3;

HandshakeFields fields(Random& random, HandshakeType type, uint32_t from, uint32_t to) {
  HandshakeFields out;
  out.type = type;
  out.from = from;
  out.to = to;
  out.world = kWorld;
  out.number = 1;  // the first connection of the two
  out.met = random.one_in(4) ? static_cast<uint8_t>(random.below(256)) : 0;
  auto nonce = random.bytes(out.nonce.size());
  std::copy(nonce.begin(), nonce.end(), out.nonce.begin());
  if (!random.one_in(4)) return out;
  auto number = [&] { return static_cast<uint32_t>(random.odd_number()); };
  switch (random.below(8)) {
    case 0:
      out.version = number();
      break;
    case 1:
      out.epoch = number();
      break;
    case 2:
      out.from = number();
      break;
    case 3:
      out.to = number();
      break;
    case 4:
      out.world = number();
      break;
    case 5:
      out.type = static_cast<HandshakeType>(number());
      break;
    case 6:
      out.number = random.odd_number();
      break;
    default:
      out.refusal = static_cast<Refusal>(number());
      break;
  }
  return out;
}

std::vector<std::byte> message(Random& random, const HandshakeFields& fields, std::span<const std::byte> transcript) {
  bool wrong_secret = random.one_in(8);
  std::vector<std::byte> secret = wrong_secret ? random.bytes(32) : kSecret;
  HandshakeMessage made = encode_handshake(fields, secret, transcript);
  return {made.begin(), made.end()};
}

// A message that was changed anywhere must not be believed; one that was not says what was put in.
void check_message(Random& random) {
  auto transcript = random.bytes(random.below(3) * kHandshakeBytes);
  HandshakeFields sent = fields(random, HandshakeType::kHello, 1, 0);
  HandshakeMessage right = encode_handshake(sent, kSecret, transcript);
  std::vector<std::byte> changed(right.begin(), right.end());
  mutate(changed, random);
  changed.resize(kHandshakeBytes);
  HandshakeMessage received;
  std::copy(changed.begin(), changed.end(), received.begin());
  auto read = decode_handshake(received, kSecret, transcript);
  require(read.has_value() == (received == right), "a message is believed exactly if it is as it was sent");
  if (!read) return count("messages not believed");
  count("messages believed");
  HandshakeFields mine;
  mine.world = kWorld;
  Refusal verdict = judge_hello(*read, mine);
  require(verdict != Refusal::kNone || (read->from > 0 && read->from < kWorld && read->to == 0), "who is let in fits");
  require(!refusal_text(static_cast<Refusal>(random.odd_number()), *read, mine).empty(), "a refusal has words");
}

// What follows a message belongs to the next.
bool begins_with(const std::vector<std::byte>& sent, const std::vector<std::byte>& right) {
  return sent.size() >= right.size() && std::equal(right.begin(), right.end(), sent.begin());
}

void set_linger_reset(int fd) {
  linger reset{1, 0};  // a reset leaves no port in TIME_WAIT: there would soon be none left
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
}

void send_in_pieces(Random& random, int fd, std::span<const std::byte> bytes, Connector& connector) {
  while (!bytes.empty()) {
    std::size_t part = random.one_in(2) ? bytes.size() : 1 + random.below(bytes.size());
    if (send(fd, bytes.data(), part, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
    bytes = bytes.subspan(part);
    connector.step(0);
  }
}

std::vector<std::byte> receive_now(int fd) {
  std::vector<std::byte> out(1024);
  ssize_t got = recv(fd, out.data(), out.size(), MSG_DONTWAIT);
  out.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return out;
}

TcpListener listen_here() {
  int error_number = 0;
  auto listener = TcpListener::try_bind("127.0.0.1", 0, 16, error_number);
  require(listener.has_value(), "a port is free");
  return std::move(*listener);
}

HandshakeFields rank_fields(uint32_t rank) {
  HandshakeFields mine;
  mine.to = rank;
  mine.world = kWorld;
  return mine;
}

// A rank that listens: exactly the processes with a correct handshake are connected.
void call_a_rank(Random& random) {
  Connector connector(rank_fields(0), kSecret, std::vector<char>(kWorld, 1));
  std::vector<TcpListener> listeners;
  listeners.push_back(listen_here());
  SocketAddress address = listeners.front().address();
  connector.listener().listen_on(std::move(listeners));
  std::array<bool, kWorld> honest_ever{};
  for (uint64_t calls = 1 + random.below(3); calls > 0; --calls) {
    int error_number = 0;
    Fd peer = start_connect(address, error_number);
    if (!peer) return;
    set_linger_reset(peer.get());
    auto from = static_cast<uint32_t>(1 + random.below(2));
    uint32_t claimed = from;  // the rank in an authentic hello
    bool honest = true;
    std::vector<std::byte> transcript;
    for (HandshakeType type : {HandshakeType::kHello, HandshakeType::kConfirm}) {
      HandshakeFields said = fields(random, type, from, 0);
      if (type == HandshakeType::kHello) claimed = said.from;
      auto sent = message(random, said, transcript);
      auto right = sent;
      if (random.one_in(3)) mutate(sent, random);
      honest = honest && begins_with(sent, right);
      send_in_pieces(random, peer.get(), sent, connector);
      for (int i = 0; i < 3; ++i) connector.step(0);
      auto reply = receive_now(peer.get());
      transcript.insert(transcript.end(), sent.begin(), sent.end());
      transcript.insert(transcript.end(), reply.begin(), reply.end());
    }
    for (int i = 0; i < 3; ++i) connector.step(0);
    if (connector.connected(static_cast<int>(from))) count("let in");
    if (claimed < kWorld && honest)
      honest_ever[claimed] = true;  // a correct handshake may be reported only during the next one
    require(honest_ever[from] || !connector.connected(static_cast<int>(from)), "who is not honest stays outside");
    (void)connector.failure();
    (void)connector.problem(static_cast<int>(from));
  }
}

// A rank that calls: what it is answered is not what it expects.
void be_called(Random& random) {
  TcpListener listener = listen_here();
  Connector connector(rank_fields(1), kSecret, std::vector<char>(kWorld, 1));
  connector.set_route(0, {{listener.address()}, {}}, false);
  std::vector<Fd> peers;
  for (int i = 0; i < 6 && !connector.connected(0) && !connector.failure(); ++i) {
    connector.step(0);
    int error_number = 0;
    if (auto caller = listener.accept(error_number)) {
      set_linger_reset(caller->first.get());
      peers.push_back(std::move(caller->first));
    }
    if (peers.empty()) continue;
    auto hello = receive_now(peers.back().get());
    if (hello.size() < kHandshakeBytes) continue;
    HandshakeType type = random.one_in(4) ? HandshakeType::kRefusal : HandshakeType::kReply;
    auto sent = message(random, fields(random, type, 0, 1), std::span(hello).first(kHandshakeBytes));
    auto right = sent;
    if (random.one_in(2)) mutate(sent, random);
    send_in_pieces(random, peers.back().get(), sent, connector);
    connector.step(0);
    if (connector.connected(0)) count("took an answer");
    if (connector.connected(0)) require(begins_with(sent, right), "only a right answer is taken");
  }
  for (Fd& peer : peers) peer.reset();
  connector.step(0);
  (void)connector.failure();
}

// Keys of the store come from outside, too.
void read_the_store(Random& random) {
  Record record{{"addresses", "10.0.0.1:4000,[fd00::1%eth0]:4000,127.0.0.1:1"}, {"pid", "4711"}, {"kind", "3"}};
  std::string text = write_record(record);
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  mutate(bytes, random);
  text.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Record read = read_record(text);
  (void)number(field(read, "pid"));
  (void)hex_decode(field(read, "pid"));
  std::vector<Interface> mine{{"eth0", "10.0.0.7", 24, false, true}, {"lo", "127.0.0.1", 8, true, true}};
  std::vector<std::string> published;
  for (const std::string& it : split(field(read, "addresses"), ','))
    if (it.find_first_not_of("0123456789.:[]") == std::string::npos) published.push_back(it);  // look up no names here
  // Each may refuse its input, with a text.
  auto attempt = [](auto call, const char* what) {
    try {
      (void)call();
      count(what);
    } catch (const Error& error) {
      require(std::strlen(error.what()) > 10, "an error has words");
    }
  };
  attempt([&] { return candidates_of_peer(published, random.one_in(2), mine, 1); }, "addresses read");
  attempt([&] { return select_interfaces(mine, text.substr(0, 1 + random.below(20))); }, "interfaces chosen");
  (void)in_network(field(read, "addresses"), "10.0.0.0", static_cast<int>(random.below(40)));
  count("records read");
}

}  // namespace

void round(Random& random) {
  switch (random.below(8)) {
    case 0:
      return call_a_rank(random);
    case 1:
      return be_called(random);
    case 2:
      return read_the_store(random);
    default:
      return check_message(random);
  }
}

}  // namespace ringdp::fuzz

// A long line in user space: a TUN device in each of several network namespaces, and between them a rate, a delay, a
// loss and a queue for each sender. Compiled and started by long_line.py.
//
//   long_line DEVICE RATE_BIT DELAY_US LOSS_PERCENT QUEUE_US NAT_MASK NAMESPACE:ADDRESS…
//
// Bit i of NAT_MASK: host i takes no connections from outside, as behind a NAT. Prints "ready" once all devices are
// there, forwards IPv4 until its input ends. Without loss the kernel hands over up to 64 KiB at once, as to a network
// card, and many packets cost what one costs; with loss each packet comes by itself.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

namespace {

using Nanoseconds = int64_t;

struct Head {  // virtio_net_hdr, whose header C++ does not take
  uint8_t flags, gso_type;
  uint16_t hdr_len, gso_size, csum_start, csum_offset;
};

constexpr std::size_t kMostBytes = 65536 + sizeof(Head);
constexpr int kBurst = 64;          // packets of one host before the next one's turn
constexpr int kEthernetBytes = 38;  // preamble, header, check and gap of a packet on the wire
constexpr Nanoseconds kLongestWait = 50'000'000;

struct Line {
  double rate_bit = 0;
  Nanoseconds delay = 0, queue = 0;
  double loss = 0;
  unsigned long nat = 0;
};

struct Packet {
  Nanoseconds due = 0;  // when it arrives
  std::size_t to = 0;
  std::vector<char> bytes;  // with its Head
};

struct Host {
  int fd = -1;
  uint32_t address = 0;
  std::deque<Packet> sent;    // in order of arrival
  Nanoseconds line_free = 0;  // when its uplink has sent what is queued
};

Nanoseconds now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "long_line: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

Host make_host(const std::string& text, const char* device, bool whole) {
  const auto colon = text.find(':');
  const std::string path = "/run/netns/" + text.substr(0, colon), address = text.substr(colon + 1);
  const int space = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail(path);
  close(space);
  Host host;
  host.fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  std::snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", device);
  if (host.fd < 0 || ioctl(host.fd, TUNSETIFF, &request) != 0) fail("/dev/net/tun");
  const unsigned offload = whole ? TUN_F_CSUM | TUN_F_TSO4 : 0;
  if (ioctl(host.fd, TUNSETOFFLOAD, offload) != 0) fail("TUNSETOFFLOAD");
  host.address = inet_addr(address.c_str());
  return host;
}

const char* ip_of(const Packet& packet) { return packet.bytes.data() + sizeof(Head); }
std::size_t ip_bytes(const Packet& packet) { return packet.bytes.size() - sizeof(Head); }

// On the wire, as packets of their own.
double wire_bits(const Packet& packet) {
  Head head;
  std::memcpy(&head, packet.bytes.data(), sizeof(head));
  const std::size_t bytes = ip_bytes(packet);
  std::size_t count = 1, headers = 0;
  if (head.gso_type != 0 && head.gso_size > 0) {
    headers = std::min<std::size_t>(head.hdr_len, bytes);
    count = std::max<std::size_t>(1, (bytes - headers + head.gso_size - 1) / head.gso_size);
  }
  return 8.0 * static_cast<double>(bytes + (count - 1) * headers + count * kEthernetBytes);
}

bool opens_connection(const Packet& packet) {  // SYN without ACK
  const char* ip = ip_of(packet);
  const std::size_t header = static_cast<std::size_t>(ip[0] & 15) * 4;
  return ip[9] == IPPROTO_TCP && ip_bytes(packet) > header + 13 && (ip[header + 13] & 0x12) == 2;
}

class Forwarder {
 public:
  Forwarder(std::vector<Host> hosts, const Line& line) : hosts_(std::move(hosts)), line_(line), buffer_(kMostBytes) {}

  void run() {
    for (std::vector<pollfd> polled;;) {
      const Nanoseconds wait = std::clamp<Nanoseconds>(deliver() - now(), 0, kLongestWait);
      polled.assign(1, {STDIN_FILENO, POLLIN, 0});
      for (const Host& it : hosts_) polled.push_back({it.fd, POLLIN, 0});
      const timespec timeout{wait / 1'000'000'000, wait % 1'000'000'000};
      ppoll(polled.data(), polled.size(), &timeout, nullptr);
      if (polled[0].revents != 0) return;
      for (std::size_t i = 0; i < hosts_.size(); ++i)
        if (polled[i + 1].revents & POLLIN) take(hosts_[i]);
    }
  }

 private:
  // What is due arrives; when the next is.
  Nanoseconds deliver() {
    const Nanoseconds begin = now();
    Nanoseconds next = begin + kLongestWait;
    for (Host& from : hosts_) {
      while (!from.sent.empty() && from.sent.front().due <= begin) {
        const Packet& packet = from.sent.front();
        if (write(hosts_[packet.to].fd, packet.bytes.data(), packet.bytes.size()) < 0 && errno == EAGAIN) break;
        spare_.push_back(std::move(from.sent.front().bytes));
        from.sent.pop_front();
      }
      if (!from.sent.empty()) next = std::min(next, from.sent.front().due);
    }
    return next;
  }

  void take(Host& from) {
    for (int i = 0; i < kBurst; ++i) {
      const ssize_t length = read(from.fd, buffer_.data(), buffer_.size());
      if (length <= static_cast<ssize_t>(sizeof(Head) + sizeof(uint32_t) * 5)) return;
      Packet packet;
      if (!spare_.empty()) {
        packet.bytes = std::move(spare_.back());
        spare_.pop_back();
      }
      packet.bytes.assign(buffer_.begin(), buffer_.begin() + length);
      send(from, std::move(packet));
    }
  }

  // It joins the uplink's queue, or is lost.
  void send(Host& from, Packet packet) {
    uint32_t address = 0;
    std::memcpy(&address, ip_of(packet) + 16, sizeof(address));
    const auto to = std::find_if(hosts_.begin(), hosts_.end(), [&](const Host& it) { return it.address == address; });
    if ((ip_of(packet)[0] >> 4) != 4 || to == hosts_.end()) return;
    packet.to = static_cast<std::size_t>(to - hosts_.begin());
    if ((line_.nat >> packet.to & 1) && opens_connection(packet)) return;
    const Nanoseconds at = now(), free = std::max(from.line_free, at);
    if (free - at > line_.queue) return;
    from.line_free = free + static_cast<Nanoseconds>(line_.rate_bit > 0 ? wire_bits(packet) * 1e9 / line_.rate_bit : 0);
    if (line_.loss > 0 && chance_(random_) < line_.loss) return;
    packet.due = from.line_free + line_.delay;
    from.sent.push_back(std::move(packet));
  }

  std::vector<Host> hosts_;
  const Line line_;
  std::vector<char> buffer_;
  std::vector<std::vector<char>> spare_;  // memory of packets that have gone
  std::mt19937_64 random_{1};
  std::uniform_real_distribution<double> chance_{0, 1};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return std::fprintf(stderr, "long_line: see long_line.cpp\n"), 1;
  Line line;
  line.rate_bit = std::atof(argv[2]);
  line.delay = static_cast<Nanoseconds>(std::atof(argv[3]) * 1e3);
  line.loss = std::atof(argv[4]) / 100;
  line.queue = static_cast<Nanoseconds>(std::atof(argv[5]) * 1e3);
  line.nat = std::strtoul(argv[6], nullptr, 0);
  std::vector<Host> hosts;
  for (int i = 7; i < argc; ++i) hosts.push_back(make_host(argv[i], argv[1], line.loss == 0));
  std::printf("ready\n");
  std::fflush(stdout);
  Forwarder(std::move(hosts), line).run();
  return 0;
}

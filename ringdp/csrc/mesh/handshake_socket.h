// HandshakeSocket: a connection during its handshake. Reads and writes whole messages, with their padding; the MAC of
// each covers those before it. Its owner interprets them: a HandshakeAttempt or a Redialler. Nothing blocks. Used by
// its owner's thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "mesh/handshake.h"

namespace ringdp {

class HandshakeSocket {
 public:
  explicit HandshakeSocket(Fd socket = Fd()) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  Fd take() { return std::move(socket_); }  // it is connected
  void close() { socket_.reset(); }

  enum class Read { kWaits, kDone, kEnded };  // for more; all is here; see `why`
  Read read_message();                        // no more than that: frames follow the last
  Read read_padding();
  bool begun() const { return filled_ > 0; }  // a message has come in part

  // The message that was read; nullopt: its MAC is wrong. After `add_to_transcript` the MACs of later messages cover
  // it.
  std::optional<HandshakeFields> decode(std::span<const std::byte> secret) const;
  void add_to_transcript();

  bool announced(std::size_t bytes);  // of padding that comes next; false: more than there may be
  std::size_t padding() const { return padding_; }
  bool awaits_padding() const { return padding_left_ > 0; }

  bool send(const HandshakeFields& fields, std::span<const std::byte> secret);  // false: see `why`

  int error_number() const { return error_number_; }  // 0: it was closed
  std::string why() const;

 private:
  Read received(ssize_t got);

  Fd socket_;
  HandshakeMessage buffer_{};
  std::size_t filled_ = 0;
  std::size_t padding_ = 0;
  std::size_t padding_left_ = 0;
  std::vector<std::byte> transcript_;
  int error_number_ = 0;
};

}  // namespace ringdp

// TLS 1.3 on the connections between ranks. TlsContext: what all of a process group's connections share: OpenSSL
// (openssl.h), and what a rank shows to prove who it is: the secret of the connection (a pre-shared key, with an
// ephemeral Diffie-Hellman exchange), or its certificate. Made before the rendezvous, then constant; any thread. Shared
// by whatever makes connections, and by their channels.
//
// A TlsChannel is a Channel over a Channel: it encrypts what goes through, and ends broken when a byte is not as the
// peer sent it. Its handshake is made by its first calls of `send` and `receive`; it waits for nobody. A CountedChannel
// is above it: after a damaged record both ends know what must be sent again. Used as any channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/fd.h"
#include "base/sha256.h"
#include "transport/channel.h"

namespace ringdp {

// kCounted: no TLS; a CountedChannel alone, where the job has a door.
enum class TlsMode : uint8_t { kPlain = 0, kSecret = 1, kCertificates = 2, kCounted = 3 };

struct TlsSettings {
  TlsMode mode = TlsMode::kPlain;
  // Files in PEM format, for kCertificates: of this rank, and of those that sign the certificates of all ranks.
  std::string certificate = {};
  std::string key = {};
  std::string authorities = {};
  std::string library = {};  // empty: OpenSSL 3 of this system
};

inline constexpr const char* kWithTls = ", TLS 1.3";  // behind a transport's name

std::string tls_mode_text(TlsMode mode);  // "TLS with the job's secret"

class TlsContext;

// Null for kPlain. Throws Error(kSystem) without OpenSSL, Error(kValue) for files that cannot be used.
std::shared_ptr<const TlsContext> make_tls_context(const TlsSettings& settings);
TlsMode tls_mode_of(const TlsContext* context);  // null: kPlain

std::string openssl_version(const std::string& library = {});  // throws as make_tls_context does

// How one end of a connection protects what goes over it.
struct Protection {
  std::shared_ptr<const TlsContext> tls = {};  // null: its bytes can be read
  Digest key{};          // of this connection alone, the same at both ends: from the job's secret and the handshake
  bool dialled = false;  // by this side, which is TLS's client
  bool counted = false;  // without TLS
};

// The first connection of a pair, after its handshake. Owns the descriptor.
struct PeerSocket {
  PeerSocket() = default;
  PeerSocket(Fd socket, Protection how = {}) : fd(std::move(socket)), protection(std::move(how)) {}

  int get() const noexcept { return fd.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd); }

  Fd fd;
  Protection protection;
};

// No key may protect more than 2^24.5 records (RFC 8446, section 5.5).
inline constexpr uint64_t kTlsRecordsPerKey = uint64_t{1} << 22;

std::unique_ptr<Channel> make_tls_channel(std::unique_ptr<Channel> inner, const Protection& protection,
                                          uint64_t records_per_key = kTlsRecordsPerKey);

}  // namespace ringdp

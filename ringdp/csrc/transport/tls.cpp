#include "transport/tls.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fd.h"
#include "transport/counted.h"
#include "transport/openssl.h"
#include "transport/stripe_lane.h"

namespace ringdp {

// Owns a context of OpenSSL, and the kind of its input and output.
class TlsContext {
 public:
  explicit TlsContext(const TlsSettings& settings);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  TlsMode mode() const { return mode_; }
  openssl::Context* context() const { return context_; }
  const openssl::BioMethod* kind() const { return kind_; }

 private:
  void use_certificates(const TlsSettings& settings);

  const TlsMode mode_;
  openssl::Context* context_ = nullptr;
  openssl::BioMethod* kind_ = nullptr;
};

namespace {

constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherNumber{0x13, 0x01};
constexpr std::string_view kIdentity = "ringdp";
constexpr std::string_view kExporter = "EXPORTER-ringdp";
constexpr std::size_t kRecordBytes = 16 * 1024;  // RFC 8446, section 5.1
constexpr std::size_t kBatchBytes = 128 * 1024;  // of a call of `send`, and of what one system call reads
constexpr int kOwnData = 0;                      // SSL_get_app_data

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

Digest derived(const Digest& key, std::string_view label, std::span<const std::byte> also = {}) {
  std::vector<std::byte> text(bytes_of(label).begin(), bytes_of(label).end());
  text.insert(text.end(), also.begin(), also.end());
  return hmac_sha256(key, text);
}

struct FreeSsl {
  void operator()(openssl::Ssl* it) const { openssl::functions().SSL_free(it); }
};

// A Channel of ciphertext below, of plaintext above. Invariant: `out_` is empty or waits for room of the channel below.
class TlsChannel final : public Channel, private PathBelow {
 public:
  TlsChannel(std::unique_ptr<Channel> inner, const Protection& protection, uint64_t records_per_key);
  ~TlsChannel() override;

  IoResult send(std::span<const iovec> pieces) override;
  IoResult receive(std::span<const iovec> pieces) override;
  bool drained() override {
    flush();
    return stage_ == Stage::kEnded || (out_.empty() && inner_->drained());
  }
  void close_send() override {
    closing_ = true;
    flush();
  }
  int poll_fd() const override { return poll_.get(); }
  std::string describe() const override { return inner_->describe() + kWithTls; }
  std::string why_ended() const override { return why_; }
  NetworkPath* path() override { return this; }

  void limit_unsent(std::size_t bytes) override {
    batch_bytes_ = std::clamp(bytes, kRecordBytes, kBatchBytes);
    PathBelow::limit_unsent(bytes);
  }

  // Called by OpenSSL.
  int take_ciphertext(const char* bytes, std::size_t count, std::size_t* written);
  int give_ciphertext(openssl::Bio* bio, char* bytes, std::size_t count, std::size_t* read);
  openssl::Session* session() const;

 private:
  enum class Stage { kHandshake, kProof, kOpen, kEnded };  // by a failure, the last

  bool proceed();  // towards kOpen; false: it needs more from the peer, or has failed
  std::optional<std::size_t> read(std::span<std::byte> to);
  void write(std::span<const std::byte> bytes);
  void note(int result);
  void fail(const std::string& what, int error_number = EBADMSG);
  Digest proof(bool of_dialler);
  void write_records(PieceCursor& from);
  void flush();
  void want_room(bool wanted);
  void note_more();

  const std::unique_ptr<Channel> inner_;
  const Protection protection_;
  const Digest secret_;  // of TLS
  const uint64_t records_per_key_;
  const unsigned generation_ = fork_generation();
  const std::unique_ptr<openssl::Ssl, FreeSsl> ssl_;
  Fd poll_;  // readable: `inner_` has bytes or, if wanted, room; or there are bytes here
  Fd more_;  // eventfd(2)
  Stage stage_ = Stage::kHandshake;
  IoResult end_result_;  // in kEnded
  std::string why_;      // the same
  bool ended_ = false;   // the peer has said that nothing follows

  IoResult below_;        // of the last `receive` there without bytes
  bool starved_ = false;  // OpenSSL has used all bytes that have come
  Digest theirs_{};       // the peer's proof
  std::size_t theirs_filled_ = 0;

  std::vector<std::byte> out_;  // ciphertext
  std::size_t out_sent_ = 0;
  std::vector<std::byte> record_;
  std::vector<iovec> parts_;
  std::size_t batch_bytes_ = kBatchBytes;
  uint64_t records_ = 0;
  IoStatus last_sent_ = IoStatus::kOk;  // of `flush`
  int send_error_ = 0;
  bool closing_ = false;
  bool said_end_ = false;
  bool closed_ = false;  // the channel below, for sending
  bool wants_room_ = false;
  bool says_more_ = false;
};

TlsChannel& channel_of(openssl::Bio* bio) { return *static_cast<TlsChannel*>(openssl::functions().BIO_get_data(bio)); }

int write_bio(openssl::Bio* bio, const char* bytes, std::size_t count, std::size_t* written) {
  return channel_of(bio).take_ciphertext(bytes, count, written);
}

int read_bio(openssl::Bio* bio, char* bytes, std::size_t count, std::size_t* read) {
  return channel_of(bio).give_ciphertext(bio, bytes, count, read);
}

long control_bio(openssl::Bio*, int command, long, void*) { return command == openssl::kBioFlush ? 1 : 0; }

openssl::Session* session_of(openssl::Ssl* ssl) {
  return static_cast<TlsChannel*>(openssl::functions().SSL_get_ex_data(ssl, kOwnData))->session();
}

int use_session(openssl::Ssl* ssl, const openssl::Hash*, const unsigned char** identity, std::size_t* length,
                openssl::Session** session) {
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *length = kIdentity.size();
  *session = session_of(ssl);
  return *session != nullptr ? 1 : 0;
}

int find_session(openssl::Ssl* ssl, const unsigned char*, std::size_t, openssl::Session** session) {
  *session = session_of(ssl);
  return *session != nullptr ? 1 : 0;
}

// What OpenSSL's last call in this thread has found.
std::string problem_text() {
  const unsigned long code = openssl::functions().ERR_get_error();
  const char* text = code != 0 ? openssl::functions().ERR_reason_error_string(code) : nullptr;
  openssl::functions().ERR_clear_error();
  return text != nullptr ? text : "unknown error";
}

void need(bool done, const std::string& what) {
  if (!done) throw Error(ErrorKind::kSystem, "OpenSSL: " + what + ": " + problem_text());
}

}  // namespace

// ---- What connections share ----

TlsContext::TlsContext(const TlsSettings& settings) : mode_(settings.mode) {
  openssl::load(settings.library.empty() ? openssl::kLibrary : settings.library);
  const openssl::Functions& ssl = openssl::functions();
  ssl.ERR_clear_error();
  context_ = ssl.SSL_CTX_new(ssl.TLS_method());
  kind_ = ssl.BIO_meth_new(openssl::kBioSourceSink, "ringdp channel");
  need(context_ != nullptr && kind_ != nullptr, "no context");
  ssl.BIO_meth_set_write_ex(kind_, write_bio);
  ssl.BIO_meth_set_read_ex(kind_, read_bio);
  ssl.BIO_meth_set_ctrl(kind_, control_bio);
  need(ssl.SSL_CTX_ctrl(context_, openssl::kSetLeastVersion, openssl::kTls13, nullptr) == 1, "no TLS 1.3");
  need(ssl.SSL_CTX_set_ciphersuites(context_, kCipher) == 1, std::string("no ") + kCipher);
  ssl.SSL_CTX_set_options(context_, openssl::kNoTickets);
  ssl.SSL_CTX_set_num_tickets(context_, 0);
  ssl.SSL_CTX_ctrl(context_, openssl::kSetReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(context_, kBatchBytes);
  // Without a secret or a certificate no handshake succeeds.
  ssl.SSL_CTX_set_verify(context_, openssl::kVerifyPeer | openssl::kVerifyNeedsCertificate, nullptr);
  if (mode_ == TlsMode::kCertificates) {
    use_certificates(settings);
  } else {
    ssl.SSL_CTX_set_psk_use_session_callback(context_, use_session);
    ssl.SSL_CTX_set_psk_find_session_callback(context_, find_session);
  }
}

TlsContext::~TlsContext() {
  if (kind_ != nullptr) openssl::functions().BIO_meth_free(kind_);
  if (context_ != nullptr) openssl::functions().SSL_CTX_free(context_);
}

void TlsContext::use_certificates(const TlsSettings& settings) {
  const openssl::Functions& ssl = openssl::functions();
  const auto usable = [](bool done, const char* variable, const std::string& file) {
    if (!done)
      throw Error(ErrorKind::kValue, std::string(variable) + "=" + file + " cannot be used: " + problem_text());
  };
  usable(ssl.SSL_CTX_use_certificate_chain_file(context_, settings.certificate.c_str()) == 1, "RINGDP_TLS_CERT",
         settings.certificate);
  usable(ssl.SSL_CTX_use_PrivateKey_file(context_, settings.key.c_str(), openssl::kPem) == 1, "RINGDP_TLS_KEY",
         settings.key);
  usable(ssl.SSL_CTX_load_verify_locations(context_, settings.authorities.c_str(), nullptr) == 1, "RINGDP_TLS_CA",
         settings.authorities);
  ssl.SSL_CTX_set_purpose(context_, openssl::kAnyPurpose);  // a rank is the server of some, the client of others
}

std::shared_ptr<const TlsContext> make_tls_context(const TlsSettings& settings) {
  return settings.mode == TlsMode::kPlain ? nullptr : std::make_shared<const TlsContext>(settings);
}

TlsMode tls_mode_of(const TlsContext* context) { return context != nullptr ? context->mode() : TlsMode::kPlain; }

std::string tls_mode_text(TlsMode mode) {
  switch (mode) {
    case TlsMode::kSecret:
      return "TLS with the job's secret";
    case TlsMode::kCertificates:
      return "TLS with certificates";
    case TlsMode::kCounted:
      return "no TLS, and a door";
    case TlsMode::kPlain:
      break;
  }
  return "no TLS";
}

std::string openssl_version(const std::string& library) {
  openssl::load(library.empty() ? openssl::kLibrary : library);
  return openssl::functions().OpenSSL_version(openssl::kVersionText);
}

// ---- One connection ----

namespace {

TlsChannel::TlsChannel(std::unique_ptr<Channel> inner, const Protection& protection, uint64_t records_per_key)
    : PathBelow(*inner->path()),
      inner_(std::move(inner)),
      protection_(protection),
      secret_(derived(protection.key, "ringdp tls")),
      records_per_key_(records_per_key),
      ssl_(openssl::functions().SSL_new(protection.tls->context())),
      poll_(epoll_create1(EPOLL_CLOEXEC)),
      more_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!poll_ || !more_) throw_system("create the descriptors of a TLS connection", errno);
  const openssl::Functions& ssl = openssl::functions();
  openssl::Bio* const bio = ssl_ != nullptr ? ssl.BIO_new(protection_.tls->kind()) : nullptr;
  need(bio != nullptr, "no connection");
  ssl.BIO_set_data(bio, this);
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_.get(), bio, bio);
  ssl.SSL_set_ex_data(ssl_.get(), kOwnData, this);
  if (protection_.dialled) {
    ssl.SSL_set_connect_state(ssl_.get());
  } else {
    ssl.SSL_set_accept_state(ssl_.get());
    ssl.SSL_set_session_id_context(ssl_.get(), reinterpret_cast<const unsigned char*>(kIdentity.data()),
                                   kIdentity.size());
  }
  for (const int fd : {inner_->poll_fd(), more_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system("watch a descriptor", errno);
  }
  proceed();
  flush();
}

// A forked child has closed the descriptors, and their numbers may be another file's.
TlsChannel::~TlsChannel() {
  if (fork_generation() == generation_ && stage_ == Stage::kOpen && out_.empty()) close_send();
}

int TlsChannel::take_ciphertext(const char* bytes, std::size_t count, std::size_t* written) {
  const auto* from = reinterpret_cast<const std::byte*>(bytes);
  out_.insert(out_.end(), from, from + count);
  *written = count;
  return 1;
}

int TlsChannel::give_ciphertext(openssl::Bio* bio, char* bytes, std::size_t count, std::size_t* read) {
  const openssl::Functions& ssl = openssl::functions();
  ssl.BIO_clear_flags(bio, openssl::kBioRetryFlags);
  const iovec all{bytes, count};
  const IoResult result = inner_->receive(std::span(&all, 1));
  *read = result.bytes;
  starved_ = result.status != IoStatus::kOk;
  if (!starved_) return 1;
  below_ = result;
  ssl.BIO_set_flags(bio, openssl::kBioRetryRead);
  return 0;
}

openssl::Session* TlsChannel::session() const {
  const openssl::Functions& ssl = openssl::functions();
  openssl::Session* const made = ssl.SSL_SESSION_new();
  const bool fits = made != nullptr &&
                    ssl.SSL_SESSION_set1_master_key(made, reinterpret_cast<const unsigned char*>(secret_.data()),
                                                    secret_.size()) == 1 &&
                    ssl.SSL_SESSION_set_cipher(made, ssl.SSL_CIPHER_find(ssl_.get(), kCipherNumber.data())) == 1 &&
                    ssl.SSL_SESSION_set_protocol_version(made, openssl::kTls13) == 1;
  if (fits) return made;
  ssl.SSL_SESSION_free(made);
  return nullptr;
}

void TlsChannel::fail(const std::string& what, int error_number) {
  if (stage_ == Stage::kEnded) return;
  stage_ = Stage::kEnded;
  end_result_ = {IoStatus::kBroken, 0, error_number};
  why_ = what;
}

// Of a call that has not succeeded: its channel has no bytes, or has ended; or it is over.
void TlsChannel::note(int result) {
  const openssl::Functions& ssl = openssl::functions();
  const int kind = ssl.SSL_get_error(ssl_.get(), result);
  if (kind == openssl::kErrorWantRead) {
    if (below_.status == IoStatus::kBroken) return fail("", below_.error_number);
    if (below_.status == IoStatus::kClosed) return fail("", 0);  // as a process ends that was killed
    return;
  }
  if (kind == openssl::kErrorZeroReturn) {
    ended_ = true;
    return;
  }
  const bool begun = stage_ == Stage::kOpen;
  const long verified = ssl.SSL_get_verify_result(ssl_.get());
  const std::string problem = problem_text();
  const bool told = problem.find("alert") != std::string::npos;
  if (begun)
    return fail((told ? "TLS: the other end has found damaged bytes on the connection ("
                      : "TLS: bytes on the connection were changed on the way (") +
                problem + ")");
  // A failure of this rank's own check is final; the message of another may be anybody's.
  const bool refused = problem == "certificate verify failed";
  const char* certificate = refused ? ssl.X509_verify_cert_error_string(verified) : "";
  fail("TLS: the handshake failed: " +
           (refused ? std::string("the certificate of the other end: ") + certificate : problem),
       refused ? EKEYREJECTED : EBADMSG);
}

std::optional<std::size_t> TlsChannel::read(std::span<std::byte> to) {
  std::size_t got = 0;
  openssl::functions().ERR_clear_error();
  const int result = openssl::functions().SSL_read_ex(ssl_.get(), to.data(), to.size(), &got);
  if (result == 1) return got;
  note(result);
  return std::nullopt;
}

void TlsChannel::write(std::span<const std::byte> bytes) {
  const openssl::Functions& ssl = openssl::functions();
  ssl.ERR_clear_error();
  if (++records_ % records_per_key_ == 0) ssl.SSL_key_update(ssl_.get(), openssl::kUpdateOwnKey);
  std::size_t written = 0;
  const int result = ssl.SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written);
  if (result != 1) note(result);
}

// Shows that this end of TLS has made the connection's handshake too: otherwise the owner of another certificate could
// stand between the two.
Digest TlsChannel::proof(bool of_dialler) {
  std::array<std::byte, kSha256Bytes> exported{};
  const int done = openssl::functions().SSL_export_keying_material(
      ssl_.get(), reinterpret_cast<unsigned char*>(exported.data()), exported.size(), kExporter.data(),
      kExporter.size(), nullptr, 0, 0);
  if (done != 1) fail("TLS: no keys can be exported: " + problem_text());
  return derived(protection_.key, of_dialler ? "ringdp tls, dialled" : "ringdp tls, accepted", exported);
}

bool TlsChannel::proceed() {
  const openssl::Functions& ssl = openssl::functions();
  if (stage_ == Stage::kHandshake) {
    ssl.ERR_clear_error();
    const int result = ssl.SSL_do_handshake(ssl_.get());
    if (result != 1) {
      note(result);
      return false;
    }
    const bool secret = protection_.tls->mode() == TlsMode::kSecret;
    if (secret && ssl.SSL_session_reused(ssl_.get()) != 1) {
      fail("TLS: the other end has not used the secret");
      return false;
    }
    stage_ = secret ? Stage::kOpen : Stage::kProof;
    if (!secret) write(proof(protection_.dialled));
  }
  while (stage_ == Stage::kProof) {
    const auto got = read(std::span(theirs_).subspan(theirs_filled_));
    if (!got) return false;
    theirs_filled_ += *got;
    if (theirs_filled_ < theirs_.size()) continue;
    if (equal_bytes(theirs_, proof(!protection_.dialled)))
      stage_ = Stage::kOpen;
    else
      fail("TLS: the other end is not the rank of the handshake before it", EKEYREJECTED);
  }
  return stage_ == Stage::kOpen;
}

// Small pieces share a record; a full one is taken where it lies.
void TlsChannel::write_records(PieceCursor& from) {
  std::size_t left = std::min(from.left(), batch_bytes_);
  while (left > 0) {
    const std::size_t count = std::min(left, kRecordBytes);
    parts_.clear();
    from.list(count, parts_);
    if (parts_.size() == 1) {
      write({static_cast<const std::byte*>(parts_.front().iov_base), count});
    } else {
      record_.clear();
      for (const iovec& it : parts_) {
        const auto* bytes = static_cast<const std::byte*>(it.iov_base);
        record_.insert(record_.end(), bytes, bytes + it.iov_len);
      }
      write(record_);
    }
    from.skip(count);
    left -= count;
  }
}

void TlsChannel::flush() {
  if (closing_ && stage_ == Stage::kOpen && !std::exchange(said_end_, true))
    openssl::functions().SSL_shutdown(ssl_.get());
  last_sent_ = IoStatus::kOk;
  while (out_sent_ < out_.size()) {
    const iovec rest{out_.data() + out_sent_, out_.size() - out_sent_};
    const IoResult result = inner_->send(std::span(&rest, 1));
    last_sent_ = result.status;
    if (result.status == IoStatus::kBroken) send_error_ = result.error_number;
    if (result.status != IoStatus::kOk) break;
    out_sent_ += result.bytes;
  }
  if (out_sent_ == out_.size()) {
    out_.clear();
    out_sent_ = 0;
  }
  const bool nothing_follows = out_.empty() ? said_end_ || stage_ == Stage::kEnded : send_error_ != 0;
  if (closing_ && nothing_follows && !std::exchange(closed_, true)) inner_->close_send();
  want_room(last_sent_ == IoStatus::kWouldBlock);
}

void TlsChannel::want_room(bool wanted) {
  if (wanted == wants_room_) return;
  epoll_event event{};
  event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
  epoll_ctl(poll_.get(), EPOLL_CTL_MOD, inner_->poll_fd(), &event);
  wants_room_ = wanted;
}

// Bytes that have been read from the channel below do not make it readable.
void TlsChannel::note_more() {
  const bool more =
      stage_ != Stage::kEnded && !ended_ && !starved_ && openssl::functions().SSL_has_pending(ssl_.get()) == 1;
  if (more == says_more_) return;
  says_more_ = more;
  uint64_t value = 1;
  [[maybe_unused]] const ssize_t moved =
      more ? ::write(more_.get(), &value, sizeof(value)) : ::read(more_.get(), &value, sizeof(value));
}

IoResult TlsChannel::send(std::span<const iovec> pieces) {
  if (stage_ != Stage::kOpen && stage_ != Stage::kEnded) {
    proceed();
    note_more();
  }
  flush();
  if (stage_ == Stage::kEnded) return end_result_;
  if (send_error_ != 0) return {IoStatus::kBroken, 0, send_error_};
  if (last_sent_ != IoStatus::kOk) return {last_sent_, 0, 0};
  if (stage_ != Stage::kOpen || closing_) return {IoStatus::kWouldBlock, 0, 0};
  PieceCursor from(pieces);
  write_records(from);
  flush();
  return {IoStatus::kOk, from.done(), 0};
}

IoResult TlsChannel::receive(std::span<const iovec> pieces) {
  flush();
  PieceCursor to(pieces);
  starved_ = false;
  while (to.left() > 0 && !ended_ && proceed()) {
    parts_.clear();
    to.list(to.left(), parts_);
    const auto got = read({static_cast<std::byte*>(parts_.front().iov_base), parts_.front().iov_len});
    if (!got) break;
    to.skip(*got);
  }
  flush();
  note_more();
  if (to.done() > 0) return {IoStatus::kOk, to.done(), 0};
  if (stage_ == Stage::kEnded) return end_result_;
  return {ended_ ? IoStatus::kClosed : IoStatus::kWouldBlock, 0, 0};
}

}  // namespace

std::unique_ptr<Channel> make_tls_channel(std::unique_ptr<Channel> inner, const Protection& protection,
                                          uint64_t records_per_key) {
  return std::make_unique<CountedChannel>(std::make_unique<TlsChannel>(std::move(inner), protection, records_per_key));
}

}  // namespace ringdp

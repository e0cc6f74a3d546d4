// The functions of the system's OpenSSL 3 that TLS needs (tls.h), by their own prototypes: ringdp is built without its
// headers, and loads its library (dlopen(3)) only where a job asks for TLS. Their manual pages are in section 3ssl.
// The table is filled once in a process, and then constant: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringdp::openssl {

inline constexpr const char* kLibrary = "libssl.so.3";

// Their structures are used through pointers alone.
struct Method;      // SSL_METHOD
struct Context;     // SSL_CTX
struct Ssl;         // SSL
struct Session;     // SSL_SESSION
struct Cipher;      // SSL_CIPHER
struct Hash;        // EVP_MD
struct Bio;         // BIO
struct BioMethod;   // BIO_METHOD
struct StoreState;  // X509_STORE_CTX

using UseSession = int (*)(Ssl*, const Hash*, const unsigned char** identity, std::size_t* length, Session**);
using FindSession = int (*)(Ssl*, const unsigned char* identity, std::size_t length, Session**);
using BioWrite = int (*)(Bio*, const char*, std::size_t, std::size_t* written);
using BioRead = int (*)(Bio*, char*, std::size_t, std::size_t* read);
using BioControl = long (*)(Bio*, int command, long number, void* pointer);
using Verify = int (*)(int, StoreState*);

// name, result, arguments
#define RINGDP_OPENSSL(X)                                                                                              \
  X(OpenSSL_version, const char*, (int what))                                                                          \
  X(TLS_method, const Method*, ())                                                                                     \
  X(SSL_CTX_new, Context*, (const Method*))                                                                            \
  X(SSL_CTX_free, void, (Context*))                                                                                    \
  X(SSL_CTX_ctrl, long, (Context*, int command, long number, void* pointer))                                           \
  X(SSL_CTX_set_default_read_buffer_len, void, (Context*, std::size_t bytes))                                          \
  X(SSL_CTX_set_options, uint64_t, (Context*, uint64_t options))                                                       \
  X(SSL_CTX_set_ciphersuites, int, (Context*, const char* names))                                                      \
  X(SSL_CTX_set_num_tickets, int, (Context*, std::size_t number))                                                      \
  X(SSL_CTX_set_verify, void, (Context*, int mode, Verify))                                                            \
  X(SSL_CTX_set_purpose, int, (Context*, int purpose))                                                                 \
  X(SSL_CTX_set_psk_use_session_callback, void, (Context*, UseSession))                                                \
  X(SSL_CTX_set_psk_find_session_callback, void, (Context*, FindSession))                                              \
  X(SSL_CTX_use_certificate_chain_file, int, (Context*, const char* file))                                             \
  X(SSL_CTX_use_PrivateKey_file, int, (Context*, const char* file, int type))                                          \
  X(SSL_CTX_load_verify_locations, int, (Context*, const char* file, const char* folder))                              \
  X(SSL_new, Ssl*, (Context*))                                                                                         \
  X(SSL_free, void, (Ssl*))                                                                                            \
  X(SSL_set_bio, void, (Ssl*, Bio * read, Bio * write))                                                                \
  X(SSL_set_session_id_context, int, (Ssl*, const unsigned char* name, unsigned length))                               \
  X(SSL_set_ex_data, int, (Ssl*, int index, void*))                                                                    \
  X(SSL_get_ex_data, void*, (const Ssl*, int index))                                                                   \
  X(SSL_set_accept_state, void, (Ssl*))                                                                                \
  X(SSL_set_connect_state, void, (Ssl*))                                                                               \
  X(SSL_do_handshake, int, (Ssl*))                                                                                     \
  X(SSL_session_reused, int, (const Ssl*))                                                                             \
  X(SSL_get_verify_result, long, (const Ssl*))                                                                         \
  X(SSL_read_ex, int, (Ssl*, void* bytes, std::size_t, std::size_t* read))                                             \
  X(SSL_write_ex, int, (Ssl*, const void* bytes, std::size_t, std::size_t* written))                                   \
  X(SSL_has_pending, int, (const Ssl*))                                                                                \
  X(SSL_key_update, int, (Ssl*, int type))                                                                             \
  X(SSL_shutdown, int, (Ssl*))                                                                                         \
  X(SSL_get_error, int, (const Ssl*, int result))                                                                      \
  X(SSL_export_keying_material, int,                                                                                   \
    (Ssl*, unsigned char* out, std::size_t, const char* label, std::size_t, const unsigned char* context, std::size_t, \
     int use_context))                                                                                                 \
  X(SSL_CIPHER_find, const Cipher*, (Ssl*, const unsigned char* two_bytes))                                            \
  X(SSL_SESSION_new, Session*, ())                                                                                     \
  X(SSL_SESSION_free, void, (Session*))                                                                                \
  X(SSL_SESSION_set1_master_key, int, (Session*, const unsigned char* key, std::size_t))                               \
  X(SSL_SESSION_set_cipher, int, (Session*, const Cipher*))                                                            \
  X(SSL_SESSION_set_protocol_version, int, (Session*, int version))                                                    \
  X(BIO_meth_new, BioMethod*, (int type, const char* name))                                                            \
  X(BIO_meth_free, void, (BioMethod*))                                                                                 \
  X(BIO_meth_set_write_ex, int, (BioMethod*, BioWrite))                                                                \
  X(BIO_meth_set_read_ex, int, (BioMethod*, BioRead))                                                                  \
  X(BIO_meth_set_ctrl, int, (BioMethod*, BioControl))                                                                  \
  X(BIO_new, Bio*, (const BioMethod*))                                                                                 \
  X(BIO_set_data, void, (Bio*, void*))                                                                                 \
  X(BIO_get_data, void*, (Bio*))                                                                                       \
  X(BIO_set_init, void, (Bio*, int init))                                                                              \
  X(BIO_set_flags, void, (Bio*, int flags))                                                                            \
  X(BIO_clear_flags, void, (Bio*, int flags))                                                                          \
  X(ERR_get_error, unsigned long, ())                                                                                  \
  X(ERR_clear_error, void, ())                                                                                         \
  X(ERR_reason_error_string, const char*, (unsigned long))                                                             \
  X(X509_verify_cert_error_string, const char*, (long))

// The numbers of its headers.
inline constexpr int kVersionText = 0;             // OPENSSL_VERSION
inline constexpr int kSetLeastVersion = 123;       // SSL_CTRL_SET_MIN_PROTO_VERSION
inline constexpr int kSetReadAhead = 41;           // SSL_CTRL_SET_READ_AHEAD
inline constexpr int kTls13 = 0x0304;              // TLS1_3_VERSION
inline constexpr int kPem = 1;                     // SSL_FILETYPE_PEM
inline constexpr int kVerifyPeer = 1;              // SSL_VERIFY_PEER
inline constexpr int kVerifyNeedsCertificate = 2;  // SSL_VERIFY_FAIL_IF_NO_PEER_CERT
inline constexpr int kAnyPurpose = 7;              // X509_PURPOSE_ANY
inline constexpr uint64_t kNoTickets = 1 << 14;    // SSL_OP_NO_TICKET
inline constexpr int kErrorSsl = 1;                // SSL_ERROR_SSL
inline constexpr int kErrorWantRead = 2;           // SSL_ERROR_WANT_READ
inline constexpr int kErrorZeroReturn = 6;         // SSL_ERROR_ZERO_RETURN
inline constexpr int kUpdateOwnKey = 0;            // SSL_KEY_UPDATE_NOT_REQUESTED
inline constexpr int kBioSourceSink = 0x0400;      // BIO_TYPE_SOURCE_SINK
inline constexpr int kBioRetryRead = 0x01 | 0x08;  // BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY
inline constexpr int kBioRetryFlags = 0x0f;
inline constexpr int kBioFlush = 11;  // BIO_CTRL_FLUSH

struct Functions {
#define RINGDP_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  RINGDP_OPENSSL(RINGDP_MEMBER)
#undef RINGDP_MEMBER
};

// Loads the library, unless it is loaded. Throws Error(kSystem), which says what to install, if this host has none.
void load(const std::string& library);

const Functions& functions();  // once `load` has returned

}  // namespace ringdp::openssl

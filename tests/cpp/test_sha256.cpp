// SHA-256 and HMAC-SHA256 against the published vectors, and the helpers beside them.
#include <set>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "testing.h"

namespace ringdp {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string repeated(std::string_view hex_byte, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += hex_byte;
  return text;
}

void check_hmac(std::string_view key_hex, std::string_view data_hex, std::string_view wanted) {
  const auto key = hex_decode(key_hex);
  const auto data = hex_decode(data_hex);
  CHECK_EQ(hex_encode(hmac_sha256(key, data)), wanted);
}

CASE("SHA-256 gives FIPS 180's examples") {
  CHECK_EQ(hex_encode(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex_encode(sha256(bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex_encode(sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex_encode(sha256(bytes("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                                   "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"))),
           "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(hex_encode(sha256(bytes(std::string(1000000, 'a')))),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Lengths on both sides of the padding's corners (55 and 56 bytes, one block), each hash checked by the hash of them
// all.
CASE("SHA-256 pads every length to two blocks correctly") {
  std::vector<std::byte> digests;
  for (std::size_t length = 0; length <= 130; ++length) {
    const std::string text(length, 'x');
    const Digest digest = sha256(bytes(text));
    digests.insert(digests.end(), digest.begin(), digest.end());
  }
  CHECK_EQ(hex_encode(sha256(digests)), "f5a018ad6f7a21c451c8d98b57699f4aeeb1976b88771c339c7ea60cd09c64ef");
}

CASE("HMAC-SHA256 gives RFC 4231's test cases") {
  check_hmac(repeated("0b", 20), "4869205468657265",
             "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  check_hmac("4a656665", "7768617420646f2079612077616e7420666f72206e6f7468696e673f",
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  check_hmac(repeated("aa", 20), repeated("dd", 50),
             "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  check_hmac("0102030405060708090a0b0c0d0e0f10111213141516171819", repeated("cd", 50),
             "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  const Digest truncated = hmac_sha256(hex_decode(repeated("0c", 20)), bytes("Test With Truncation"));
  CHECK_EQ(hex_encode(std::span(truncated).first(16)), "a3b6167473100ee06e0c796c2955552b");
  const auto long_key = hex_decode(repeated("aa", 131));
  CHECK_EQ(hex_encode(hmac_sha256(long_key, bytes("Test Using Larger Than Block-Size Key - Hash Key First"))),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex_encode(hmac_sha256(long_key, bytes("This is a test using a larger than block-size key and a larger than "
                                                  "block-size data. The key needs to be hashed before being used by "
                                                  "the HMAC algorithm."))),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

CASE("equal_bytes sees every differing position and the length") {
  std::vector<std::byte> a(33, std::byte{7});
  CHECK(equal_bytes(a, a));
  CHECK(equal_bytes({}, {}));
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::vector<std::byte> b = a;
    b[i] ^= std::byte{0x80};
    CHECK(!equal_bytes(a, b));
  }
  CHECK(!equal_bytes(a, std::span(a).first(32)));
}

CASE("hexadecimal text comes back as it went") {
  std::vector<std::byte> all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<std::byte>(i));
  CHECK(hex_decode(hex_encode(all)) == all);
  CHECK_EQ(hex_encode(hex_decode("00ffAbCd")), "00ffabcd");
  CHECK(hex_decode("").empty());
}

CASE("hexadecimal text that is none is refused without being quoted") {
  CHECK_THROWS(ErrorKind::kValue, hex_decode("abc"));
  const std::string message = CHECK_THROWS(ErrorKind::kValue, hex_decode("00secret"));
  CHECK(message.find("secret") == std::string::npos);
  for (const char* text : {"0g", "g0", "0x", " 0", "/0", ":0", "@0", "`0"})
    CHECK_THROWS(ErrorKind::kValue, hex_decode(text));
}

CASE("random_bytes fills the whole span with something new") {
  std::set<std::string> seen;
  for (int i = 0; i < 16; ++i) {
    std::array<std::byte, 32> drawn{};
    random_bytes(drawn);
    seen.insert(hex_encode(drawn));
  }
  CHECK_EQ(seen.size(), 16u);
  std::vector<std::byte> large(100000);
  random_bytes(large);
  std::size_t zeros = 0;
  for (const std::byte byte : large) zeros += byte == std::byte{0};
  CHECK(zeros > 200 && zeros < 600);  // 391 expected, standard deviation 20
}

}  // namespace
}  // namespace ringdp

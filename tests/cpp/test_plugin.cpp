// Codecs from shared libraries (../c_libraries/int8.c, built beside this binary): loading them from several threads,
// what is refused, and the compressed all-reduce over them, where a sanitizer sees every byte, of the library too.
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "codec/plugin.h"
#include "codec/promises.h"
#include "job.h"
#include "references.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

std::string library(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / (name + ".so")).string();
}

std::vector<float> gaussian(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> x(count);
  for (float& it : x) it = normal(random);
  return x;
}

struct Parameters {
  Parameters(const std::vector<std::size_t>& counts, unsigned seed) {
    for (std::size_t count : counts) {
      x.push_back(gaussian(count, seed++));
      residual.push_back(gaussian(count, seed++));
      next.emplace_back(count);
    }
  }
  std::vector<CompressedSection> sections() {
    std::vector<CompressedSection> out;
    for (std::size_t i = 0; i < x.size(); ++i)
      out.push_back({.x = x[i].data(),
                     .count = x[i].size(),
                     .owner_offset = static_cast<uint32_t>(i),
                     .residual = residual[i].data(),
                     .new_residual = next[i].data()});
    return out;
  }
  std::vector<std::vector<float>> x, residual, next;
};

}  // namespace

CASE("a library is one codec, whoever loads it and however often") {
  std::vector<std::thread> threads;
  std::vector<const Plugin*> found(8);
  for (std::size_t i = 0; i < found.size(); ++i)
    threads.emplace_back([&, i] {
      found[i] = &load_plugin(library(i % 2 == 0 ? "c_all" : "c_made"));
      const Codec& it = codec(codec_by_name(found[i]->name));
      const std::vector<float> x = gaussian(1000, 3);
      std::vector<std::byte> code(it.encoded_bytes(x.size()));
      CHECK(it.compress(code.data(), x.data(), x.size()) == Encoded::kFinite);
      CHECK(it.inspect(code.data(), x.size()) == Encoded::kFinite);
    });
  for (std::thread& it : threads) it.join();
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == found[i % 2]);
  CHECK(found[0] != found[1]);
  CHECK_EQ(found[0]->name, std::string("c_all"));
  CHECK_EQ(found[0]->sha256.size(), std::size_t{64});
  CHECK(find_plugin(found[0]->sha256) == found[0]);
  const CodecId id = codec_by_name("c_made");
  CHECK(is_plugin(id));
  CHECK(&codec_reference(id) == &codec(id));
  CHECK(wire_number(id) >= 1 << 30);
  CHECK(wire_number(id) != wire_number(codec_by_name("c_all")));
  CHECK_EQ(wire_number(CodecId::kInt4), 3);
}

CASE("what is no library is refused") {
  const auto refused = [](const std::string& path) { return CHECK_THROWS(ErrorKind::kValue, load_plugin(path)); };
  CHECK(refused("/nowhere/x.so").find("/nowhere/x.so cannot be used: No such file") != std::string::npos);
  CHECK(refused("/").find("it is not a file") != std::string::npos);
  CHECK(refused(library("test_plugin.o").substr(0, 1) + "proc/self/exe").find("cannot be used") != std::string::npos);
  const std::string unknown = CHECK_THROWS(ErrorKind::kValue, codec_by_name("nobody"));
  CHECK(unknown.find("int4") != std::string::npos && unknown.find("c_all") != std::string::npos);
  CHECK_THROWS(ErrorKind::kValue, codec(static_cast<CodecId>(kFirstPlugin + kMostPlugins - 1)));
  CHECK_THROWS(ErrorKind::kValue, codec(static_cast<CodecId>(255)));
}

CASE("the same code has the bits of the codec of ringdp") {
  for (const char* name : {"c_all", "c_made"}) {
    const Codec& theirs = codec(codec_by_name(load_plugin(library(name)).name));
    const Codec& ours = codec(CodecId::kInt8);
    for (const std::size_t count : {0, 1, 255, 256, 5000}) {
      const std::vector<float> x = gaussian(count, 5), residual = gaussian(count, 6);
      std::vector<std::byte> code(ours.encoded_bytes(count)), other(theirs.encoded_bytes(count));
      std::vector<float> left(count), other_left(count), sum = x, other_sum = x;
      CHECK(ours.compress_with_feedback(code.data(), x.data(), residual.data(), left.data(), 4.0f, count) ==
            theirs.compress_with_feedback(other.data(), x.data(), residual.data(), other_left.data(), 4.0f, count));
      CHECK(code == other);
      CHECK(left == other_left);
      ours.decode_add(sum.data(), code.data(), count);
      theirs.decode_add(other_sum.data(), code.data(), count);
      CHECK(sum == other_sum);
    }
  }
}

CASE("promises of libraries are checked") {
  for (const char* name : {"c_all", "c_made", "c_long"})
    for (const std::string& said : broken_promises(codec(codec_by_name(load_plugin(library(name)).name))))
      report_failure(__FILE__, __LINE__, std::string(name) + ": " + said);
  const auto said = broken_promises(codec(codec_by_name(load_plugin(library("c_overruns")).name)));
  CHECK_EQ(said.size(), std::size_t{1});
  CHECK(said.front().find("compress writes outside the code of 1 element") != std::string::npos);
}

CASE("means over codes with a kilobyte before each") {
  const std::vector<std::size_t> counts = [] {
    std::vector<std::size_t> it(5000, 3);  // so many that segments are of the longest kind, and their codes longer
    it.push_back(70'000);
    return it;
  }();
  const CodecId id = codec_by_name(load_plugin(library("c_long")).name);
  for (const int world : {3}) {
    std::vector<Parameters> all, inputs;
    for (int rank = 0; rank < world; ++rank) all.emplace_back(counts, static_cast<unsigned>(1000 * rank));
    inputs = all;
    run_job(world, AlgorithmTable{}, [&](Rank& self) {
      CallOptions options;
      options.finite = std::make_shared<FiniteReport>();
      auto report = options.finite;
      auto& mine = all[static_cast<std::size_t>(self.rank)];
      self.wait(self.group->all_reduce_compressed(
          mine.sections(), {.codec = id, .loss_scale = 1.0F, .divisor = static_cast<std::size_t>(world)},
          std::move(options)));
      CHECK(report->finite);
    });
    for (std::size_t i = 0; i < counts.size(); ++i)
      for (int rank = 1; rank < world; ++rank) CHECK(all[static_cast<std::size_t>(rank)].x[i] == all[0].x[i]);
    float exact = 0;
    for (const Parameters& it : inputs) exact += it.x.back()[5] / static_cast<float>(world);
    CHECK(std::fabs(all[0].x.back()[5] - exact) < 2.5F);  // residuals are part of it
  }
}

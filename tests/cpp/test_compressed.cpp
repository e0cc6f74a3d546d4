// The compressed all-reduce: that both ends of every stream expect the same pieces, and its sums, with small segments
// and several in flight, where a sanitizer sees every step.
#include <cmath>
#include <deque>
#include <numeric>
#include <random>

#include "collective/compressed_plan.h"
#include "job.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

const std::vector<std::vector<int>> kLayouts{
    {0, 1},       {0, 1, 2},    {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0, 1, 1}, {0, 1, 0, 1},
    {0, 0, 0, 1}, {0, 0, 1, 2}, {0, 1, 1, 2, 0, 2, 2, 1}};

struct OnRank {
  OnRank(const std::vector<int>& hosts, int rank, std::span<const CompressedSection> sections, CodecId id,
         bool far = false)
      : map(view_of(hosts, rank)), plan(map, sections, codec(id), far) {}

  HostMap map;
  CompressedPlan plan;
};

using Pieces = std::vector<std::tuple<CompressedPlan::Kind, std::size_t, uint64_t, uint64_t>>;

Pieces pieces_of(const std::vector<CompressedPlan::Stream>& streams, int member, bool* found) {
  Pieces out;
  for (const auto& stream : streams) {
    if (stream.member != member) continue;
    *found = true;
    for (const auto& it : stream.pieces) out.emplace_back(it.kind, it.segment, it.begin, it.bytes);
  }
  return out;
}

std::vector<CompressedSection> sections_of(const std::vector<std::size_t>& counts) {
  std::vector<CompressedSection> sections;
  for (std::size_t count : counts) {
    CompressedSection& it = sections.emplace_back();
    it.count = count;
    it.owner_offset = static_cast<uint32_t>(count * 2'654'435'761U);
  }
  return sections;
}

const std::vector<std::vector<std::size_t>> kSections{
    {}, {0}, {1}, {257}, {70'000, 0, 1, 255, 300}, {3'000'000, 5}, std::vector<std::size_t>(100, 700)};

// Sections in memory of their own, with residuals.
struct Parameters {
  Parameters(const std::vector<std::size_t>& counts, int seed) : sections(sections_of(counts)) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal(0.0F, 0.01F);
    for (CompressedSection& it : sections) {
      for (auto* memory : {&x, &old, &next}) memory->emplace_back(it.count, 0.0F);
      for (float& value : x.back()) value = normal(random);
      it.x = x.back().data();
      it.residual = old.back().data();
      it.new_residual = next.back().data();
    }
  }

  std::vector<CompressedSection> sections;
  std::deque<std::vector<float>> x, old, next;
};

}  // namespace

CASE("both ends of every stream find the same pieces in the same order, and each code crosses once") {
  for (const auto& hosts : kLayouts)
    for (const auto& counts : kSections)
      for (bool far : {false, true}) {
        const auto sections = sections_of(counts);
        std::deque<OnRank> ranks;
        for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
          ranks.emplace_back(hosts, rank, sections, CodecId::kInt4, far);
        std::size_t crossing = 0, due = 0;
        for (const auto& segment : ranks[0].plan.segments()) due += segment.code_bytes;
        for (std::size_t from = 0; from < ranks.size(); ++from)
          for (std::size_t to = 0; to < ranks.size(); ++to) {
            bool sends = false, receives = false;
            const auto sent = pieces_of(ranks[from].plan.outgoing(), static_cast<int>(to), &sends);
            CHECK(sent == pieces_of(ranks[to].plan.incoming(), static_cast<int>(from), &receives));
            CHECK_EQ(sends, receives);
            if (hosts[from] == hosts[to]) continue;
            for (const auto& piece : sent) crossing += std::get<3>(piece);
          }
        CHECK_EQ(crossing, 2 * (static_cast<std::size_t>(ranks[0].map.count()) - 1) * due);
      }
}

CASE("between far hosts all codes go before the first result, for which they would wait a round trip") {
  using Kind = CompressedPlan::Kind;
  const auto sections = sections_of({3'000'000, 5});
  for (const auto& hosts : kLayouts)
    for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
      for (bool far : {false, true}) {
        bool code_follows = false;
        const OnRank here(hosts, rank, sections, CodecId::kInt8, far);
        for (const auto& stream : here.plan.outgoing()) {
          if (hosts[static_cast<std::size_t>(stream.member)] == hosts[static_cast<std::size_t>(rank)]) continue;
          auto is = [](Kind kind) { return [=](const auto& it) { return it.kind == kind; }; };
          const auto result = std::find_if(stream.pieces.begin(), stream.pieces.end(), is(Kind::kResult));
          code_follows |= std::any_of(result, stream.pieces.end(), is(Kind::kCode));
        }
        CHECK(!far || !code_follows);
      }
}

CASE("segments hold every element once, cut where blocks end") {
  for (const auto& hosts : kLayouts)
    for (const auto& counts : kSections) {
      const OnRank one(hosts, 0, sections_of(counts), CodecId::kInt8);
      std::vector<std::size_t> covered(counts.size());
      for (const auto& segment : one.plan.segments()) {
        CHECK(segment.elements <= CompressedPlan::kLongestSegment);
        std::size_t elements = 0, code = 0;
        for (const auto& tile : one.plan.tiles(segment)) {
          CHECK_EQ(tile.begin, covered[tile.section]);
          CHECK_EQ(tile.element, elements);
          CHECK_EQ(tile.code, code);
          CHECK(tile.begin % CompressedPlan::kUnit == 0);
          CHECK(tile.count > 0 && tile.count <= CompressedPlan::kTileElements);
          CHECK(tile.end() == counts[tile.section] || tile.count % CompressedPlan::kUnit == 0);
          covered[tile.section] += tile.count;
          elements += tile.count;
          code += codec(CodecId::kInt8).encoded_bytes(tile.count);
        }
        CHECK_EQ(elements, segment.elements);
        CHECK_EQ(code, segment.code_bytes);
      }
      CHECK(covered == counts);
    }
}

CASE("means of all ranks, several in flight, with small segments") {
  const std::vector<std::vector<std::size_t>> buckets{{1}, {3, 70'000, 255}, {30'000}, {0}};
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 0}, {0, 0, 0, 0}, {0, 0, 1}, {0, 1, 1, 0}}) {
    MemoryStore store;
    const int world = static_cast<int>(hosts.size());
    std::vector<std::deque<Parameters>> all(hosts.size());  // which do not move them
    for (int rank = 0; rank < world; ++rank)
      for (std::size_t bucket = 0; bucket < 2 * buckets.size(); ++bucket)
        all[static_cast<std::size_t>(rank)].emplace_back(buckets[bucket % buckets.size()], rank * 100 + int(bucket));
    auto inputs = std::vector<std::vector<std::deque<std::vector<float>>>>(hosts.size());
    for (std::size_t rank = 0; rank < hosts.size(); ++rank)
      for (const auto& it : all[rank]) inputs[rank].push_back(it.x);
    run_ranks(world, [&](int rank) {
      RendezvousOptions options = rendezvous_options(rank, world);
      options.host.id = std::to_string(hosts[static_cast<std::size_t>(rank)]);
      EngineOptions engine;
      engine.segment_bytes = 1000;
      auto runtime = std::make_shared<Runtime>(store, options, engine);
      GroupHandle group(runtime, "g", everybody(world), 30'000, AlgorithmTable{});
      std::vector<std::shared_ptr<Work>> works;
      std::vector<std::shared_ptr<FiniteReport>> reports;
      for (Parameters& it : all[static_cast<std::size_t>(rank)]) {
        CallOptions call;
        reports.push_back(call.finite = std::make_shared<FiniteReport>());
        const auto id = static_cast<CodecId>(works.size() % kCodecCount);
        works.push_back(group.all_reduce_compressed(
            it.sections, {.codec = id, .loss_scale = 4.0F, .divisor = static_cast<std::size_t>(world)},
            std::move(call)));
      }
      for (auto& work : works) group.wait(*work);
      for (const auto& report : reports) CHECK(report->finite && report->own == nullptr);
    });
    std::size_t far = 0, different = 0;
    for (std::size_t bucket = 0; bucket < all[0].size(); ++bucket)
      for (std::size_t i = 0; i < all[0][bucket].x.size(); ++i)
        for (std::size_t k = 0; k < all[0][bucket].x[i].size(); ++k) {
          float exact = 0;
          for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
            exact += inputs[rank][bucket][i][k] / static_cast<float>(world);
            different += all[rank][bucket].x[i][k] != all[0][bucket].x[i][k];
          }
          far += std::fabs(all[0][bucket].x[i][k] - exact) > 0.02F;
        }
    CHECK_EQ(different, std::size_t{0});
    CHECK_EQ(far, std::size_t{0});
  }
}

CASE("means that go into other memory have the bits of those in place, and the inputs stay") {
  for (const auto& hosts : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0}, {0, 0, 1}, {0, 1, 1, 0}}) {
    MemoryStore store;
    run_ranks(static_cast<int>(hosts.size()), [&](int rank) {
      RendezvousOptions options = rendezvous_options(rank, static_cast<int>(hosts.size()));
      options.host.id = std::to_string(hosts[static_cast<std::size_t>(rank)]);
      auto runtime = std::make_shared<Runtime>(store, options, EngineOptions{});
      GroupHandle group(runtime, "everybody", everybody(static_cast<int>(hosts.size())), 30'000, AlgorithmTable{});
      std::vector<float> input(70'001), residual(input.size()), left(input.size()), left_in_place(input.size());
      for (std::size_t i = 0; i < input.size(); ++i) {
        input[i] = 1.0F / static_cast<float>(1 + rank + static_cast<int>(i % 977));
        residual[i] = static_cast<float>(i % 7) * 1e-3F;
      }
      const std::vector<float> before = input;
      std::vector<float> in_place = input, result(input.size(), -1.0F);
      const Compression how{.codec = CodecId::kInt8, .divisor = hosts.size()};
      const auto section = [&](std::vector<float>& x, float* to, std::vector<float>& next) {
        return std::vector<CompressedSection>{{.x = x.data(),
                                               .to = to,
                                               .count = x.size(),
                                               .owner_offset = 5,
                                               .residual = residual.data(),
                                               .new_residual = next.data()}};
      };
      group.wait(*group.all_reduce_compressed(section(input, result.data(), left), how, {}));
      group.wait(*group.all_reduce_compressed(section(in_place, nullptr, left_in_place), how, {}));
      CHECK(result == in_place);
      CHECK(left == left_in_place);
      CHECK(input == before);
    });
  }
}

CASE("what a call refuses") {
  run_job(1, AlgorithmTable{}, [](Rank& self) {
    Parameters it({9}, 1);
    const auto refused = [&](const std::vector<CompressedSection>& sections, const Compression& compression) {
      return CHECK_THROWS(ErrorKind::kValue, self.group->all_reduce_compressed(sections, compression, {}));
    };
    std::vector<CompressedSection> sections = it.sections;
    sections[0].x = nullptr;
    CHECK(refused(sections, {}).find("no address") != std::string::npos);
    sections = it.sections;
    sections[0].residual = nullptr;
    CHECK(refused(sections, {}).find("one residual") != std::string::npos);
    sections[0].residual = sections[0].new_residual;
    CHECK(refused(sections, {}).find("overwrite") != std::string::npos);
    CHECK(refused(it.sections, {.divisor = 0}).find("divisor") != std::string::npos);
    CHECK(refused(it.sections, {.loss_scale = NAN}).find("loss scale") != std::string::npos);
    CHECK(refused(it.sections, {.codec = static_cast<CodecId>(9)}).find("codec number 9") != std::string::npos);
    const std::vector<float> before = it.x[0];
    self.wait(self.group->all_reduce_compressed(it.sections, {}, {}));
    CHECK(it.x[0] == before);
  });
}

// Rows of tables against plain loops, to the bit, on every instruction set; and which rows a list of ids asks for.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "guarded.h"
#include "instruction_sets.h"
#include "kernels/half.h"
#include "kernels/row_index.h"
#include "kernels/rows.h"
#include "testing.h"

namespace ringdp {
namespace {

using rows::Index;
using rows::Rule;
using rows::Wire;
using testing::Guarded;
using testing::on_every_isa;

constexpr std::size_t kDims[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130};
constexpr Wire kWires[] = {Wire::kExact, Wire::kBfloat16, Wire::kInt8};
constexpr std::size_t kRows = 23;

template <class T>
std::vector<T> gaussian(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, 1.0);
  std::vector<T> out(count);
  for (T& it : out) it = static_cast<T>(normal(random));
  return out;
}

template <class T>
bool same(const T* a, const std::vector<T>& b) {
  return b.empty() || std::memcmp(a, b.data(), b.size() * sizeof(T)) == 0;
}

const std::vector<Index> kWhich = {3, -1, 22, 0, 3, 7, 11, -1, 5, 3, 19, 20, 1};

// A number of a row as it arrives, written from the definition.
template <class T>
std::vector<T> arrived(const T* row, std::size_t dim, Wire wire) {
  std::vector<T> out(row, row + dim);
  if (wire == Wire::kBfloat16)
    for (T& it : out) it = kernels::bfloat_to_float(kernels::float_to_bfloat(static_cast<float>(it)));
  if (wire == Wire::kInt8) {
    float largest = 0;
    for (const T it : out) largest = std::max(largest, std::fabs(static_cast<float>(it)));
    const float scale = largest / 127.0f;
    for (T& it : out) it = scale > 0 ? static_cast<float>(std::lrint(static_cast<float>(it) / scale)) * scale : 0.0f;
  }
  return out;
}

template <class T>
void check_gather() {
  for (const std::size_t dim : kDims) {
    const auto table = gaussian<T>(kRows * dim, 1);
    for (const Wire wire : kWires) {
      std::vector<T> wanted;
      for (const Index at : kWhich) {
        const auto row = at < 0 ? std::vector<T>(dim) : arrived(&table[at * dim], dim, wire);
        wanted.insert(wanted.end(), row.begin(), row.end());
      }
      on_every_isa([&](const std::string&) {
        Guarded<std::byte> code(kWhich.size() * rows::encoded_bytes(wire, sizeof(T), dim));
        Guarded<T> out(kWhich.size() * dim);
        rows::gather(code.data(), table.data(), kWhich, dim, wire);
        rows::decode(out.data(), code.data(), kWhich.size(), dim, wire);
        CHECK(same(out.data(), wanted) && code.intact() && out.intact());
        Guarded<std::byte> all(kRows * rows::encoded_bytes(wire, sizeof(T), dim));
        rows::encode(all.data(), table.data(), kRows, dim, wire);
        const std::size_t bytes = rows::encoded_bytes(wire, sizeof(T), dim);
        CHECK(std::memcmp(all.data() + 3 * bytes, code.data(), bytes) == 0 && all.intact());
      });
    }
  }
}

CASE("rows arrive as their definition says") {
  check_gather<float>();
  check_gather<double>();
}

CASE("a row in int8 that is not finite arrives as NaN, and a tiny one as zeros") {
  const float infinite = std::numeric_limits<float>::infinity();
  for (const float bad : {infinite, -infinite, std::nanf(""), 1e-44f, 3e-39f, 0.0f}) {
    on_every_isa([&](const std::string&) {
      std::vector<float> row(21, 1e-45f), out(21);
      row[20] = bad;
      std::vector<std::byte> code(rows::encoded_bytes(Wire::kInt8, sizeof(float), 21));
      rows::encode(code.data(), row.data(), 1, 21, Wire::kInt8);
      rows::decode(out.data(), code.data(), 1, 21, Wire::kInt8);
      for (const float it : out) CHECK(std::isfinite(bad) ? it == 0 : std::isnan(it));
    });
  }
}

template <class T>
void check_sums() {
  for (const std::size_t dim : kDims) {
    const auto source = gaussian<T>(kWhich.size() * dim, 2);
    const auto start = gaussian<T>(kRows * dim, 3);
    for (const Wire wire : kWires) {
      std::vector<T> wanted = start;
      for (std::size_t i = 0; i < kWhich.size(); ++i) {
        const auto row = arrived(&source[i * dim], dim, wire);
        for (std::size_t j = 0; kWhich[i] >= 0 && j < dim; ++j) wanted[kWhich[i] * dim + j] += row[j];
      }
      on_every_isa([&](const std::string&) {
        Guarded<T> sums(start, 0);
        std::vector<std::byte> code(kWhich.size() * rows::encoded_bytes(wire, sizeof(T), dim));
        rows::encode(code.data(), source.data(), kWhich.size(), dim, wire);
        rows::add_encoded(sums.data(), code.data(), kWhich, dim, wire);
        CHECK(same(sums.data(), wanted) && sums.intact());
      });
    }
  }
}

CASE("sums by row add in the order given") {
  check_sums<float>();
  check_sums<double>();
}

template <class T>
void check_bags(bool mean) {
  const std::vector<int64_t> begins = {0, 0, 4, 5, 5, 9, 13};  // the first, fourth and last bags are empty
  for (const std::size_t dim : kDims) {
    const auto table = gaussian<T>(kRows * dim, 4);
    const auto gradients = gaussian<T>(begins.size() * dim, 5);
    std::vector<T> wanted(begins.size() * dim), spread(kRows * dim);
    for (std::size_t b = 0; b < begins.size(); ++b) {
      const auto begin = static_cast<std::size_t>(begins[b]);
      const auto end = b + 1 < begins.size() ? static_cast<std::size_t>(begins[b + 1]) : kWhich.size();
      for (std::size_t i = begin; i < end; ++i)
        for (std::size_t j = 0; kWhich[i] >= 0 && j < dim; ++j) {
          wanted[b * dim + j] += table[kWhich[i] * dim + j];
          spread[kWhich[i] * dim + j] += gradients[b * dim + j] / static_cast<T>(mean ? end - begin : 1);
        }
      for (std::size_t j = 0; mean && end > begin && j < dim; ++j) wanted[b * dim + j] /= static_cast<T>(end - begin);
    }
    on_every_isa([&](const std::string&) {
      Guarded<T> out(begins.size() * dim), back(std::vector<T>(kRows * dim), 0);
      rows::sum_bags(out.data(), table.data(), {kWhich, begins, mean}, dim);
      rows::spread_bags(back.data(), gradients.data(), {kWhich, begins, mean}, dim);
      CHECK(same(out.data(), wanted) && same(back.data(), spread) && out.intact() && back.intact());
    });
  }
}

CASE("bags add up rows, and their gradients go back to them") {
  for (const bool mean : {false, true}) {
    check_bags<float>(mean);
    check_bags<double>(mean);
  }
}

template <class T>
T mean_of_squares(const T* g, std::size_t dim) {
  std::vector<T> lanes(16);
  for (std::size_t j = 0; j < dim; ++j) lanes[j % 16] += g[j] * g[j];
  for (std::size_t half = 8; half > 0; half /= 2)
    for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  return lanes[0] / static_cast<T>(dim);
}

// One number of one row, from the definition in rows.h.
template <class T>
void step(const rows::Update& how, T& x, T& first, T& second, T g, T squares) {
  const auto rate = static_cast<T>(how.rate), eps = static_cast<T>(how.eps);
  if (how.rule == Rule::kSgd) {
    x -= rate * g;
  } else if (how.rule == Rule::kAdam) {
    first += static_cast<T>(1 - how.beta1) * (g - first);
    second = static_cast<T>(how.beta2) * second + static_cast<T>(1 - how.beta2) * (g * g);
    x -= rate * (first / (std::sqrt(second) + eps));
  } else {
    first += how.rule == Rule::kAdagrad ? g * g : squares;
    x -= rate * (g / (std::sqrt(first) + eps));
  }
}

template <class T>
void check_update(Rule rule) {
  const rows::Update how{.rule = rule, .rate = 0.1, .eps = 1e-3, .beta1 = 0.9, .beta2 = 0.99};
  const std::vector<Index> which = {3, -1, 22, 0, 7, 11, 5, 19, 20, 1, 2, 4};
  for (const std::size_t dim : kDims) {
    const std::size_t width = rule == Rule::kRowwiseAdagrad ? 1 : dim;
    const auto start = gaussian<T>(kRows * dim, 6), sums = gaussian<T>(which.size() * dim, 7);
    const std::vector<T> ones(kRows * width, T{1});
    std::vector<T> table = start, first = ones, second = ones;
    for (std::size_t i = 0; i < which.size(); ++i) {
      if (which[i] < 0) continue;
      const T squares = mean_of_squares(&sums[i * dim], dim);
      const T before = width == 1 ? first[which[i]] : T{0};
      for (std::size_t j = 0; j < dim; ++j) {
        const std::size_t at = which[i] * width + (width == 1 && dim > 1 ? 0 : j);
        if (rule == Rule::kRowwiseAdagrad) first[at] = before;
        step(how, table[which[i] * dim + j], first[at], second[at], sums[i * dim + j], squares);
      }
    }
    on_every_isa([&](const std::string&) {
      Guarded<T> out(start, 0), one(ones, 0), two(ones, 0);
      rows::update(how, out.data(),
                   rule == Rule::kSgd ? rows::Memory<T>{} : rows::Memory<T>{.first = one.data(), .second = two.data()},
                   which, sums.data(), dim);
      CHECK(same(out.data(), table) && out.intact());
      CHECK(rule == Rule::kSgd || same(one.data(), first));
      CHECK(rule != Rule::kAdam || same(two.data(), second));
      CHECK(one.intact() && two.intact());
    });
  }
}

CASE("updates give the bits of their definition") {
  for (const Rule rule : {Rule::kSgd, Rule::kAdagrad, Rule::kRowwiseAdagrad, Rule::kAdam}) {
    check_update<float>(rule);
    check_update<double>(rule);
  }
}

std::vector<int64_t> some_ids(std::size_t count, int64_t below, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> out(count);
  for (int64_t& it : out) it = static_cast<int64_t>(random() % static_cast<uint64_t>(below));
  return out;
}

// Each id of the list is found again behind `inverse`, each once, at its owner.
template <class OwnerOf>
void check_asked(const rows::Asked& asked, std::span<const int64_t> list, OwnerOf owner_of) {
  std::set<std::pair<int64_t, int64_t>> seen;  // owner and what it knows the id by
  std::vector<int64_t> owners;
  for (std::size_t rank = 0; rank < asked.per_owner.size(); ++rank)
    owners.insert(owners.end(), asked.per_owner[rank], static_cast<int64_t>(rank));
  REQUIRE(owners.size() == asked.ids.size() && asked.times.size() == asked.ids.size());
  for (std::size_t i = 0; i < asked.ids.size(); ++i) CHECK(seen.insert({owners[i], asked.ids[i]}).second);
  std::vector<int64_t> times(asked.ids.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Index at = asked.inverse[i];
    ++times[at];
    CHECK(owner_of(list[i]) == std::make_pair(owners[at], asked.ids[at]));
  }
  CHECK(times == asked.times);
}

CASE("a list asks for each row once, at its owner") {
  for (const std::size_t count : {0, 1, 5, 1000})
    for (const uint64_t ranks : {1, 2, 3, 5}) {
      const auto list = some_ids(count, 301, static_cast<unsigned>(count));
      const rows::Deal deal{.rows = 301, .factor = 187, .ranks = ranks};
      check_asked(rows::ask(list, deal), list, [&](int64_t id) {
        const int64_t place = id * 187 % 301, n = static_cast<int64_t>(ranks);
        return std::make_pair(place % n, place / n);
      });
      auto wild = list;
      for (int64_t& it : wild) it = (it - 150) * 0x123456789ABLL;  // any 64 bits
      check_asked(rows::ask_hashed(wild, ranks), wild,
                  [&](int64_t id) { return std::make_pair(static_cast<int64_t>(rows::hash_of(id) % ranks), id); });
    }
}

CASE("distinct rows keep their order, and none stays none") {
  const rows::Asked found = rows::distinct(std::vector<Index>{4, -1, 9, 4, 0, -1, 9});
  CHECK(found.ids == (std::vector<int64_t>{4, 9, 0}));
  CHECK(found.inverse == (std::vector<Index>{0, -1, 1, 0, 2, -1, 1}));
}

// What a directory should say, by a map.
struct PlainDirectory {
  int64_t admit, evict;
  struct Known {
    int64_t seen, times;
  };
  std::map<int64_t, Known> known;

  bool has(int64_t id, int64_t clock) const {
    const auto it = known.find(id);
    return it != known.end() && (evict == 0 || clock - it->second.seen <= evict) && it->second.times >= admit;
  }
  void occur(int64_t id, int64_t times, int64_t clock) {
    Known& it = known.try_emplace(id, Known{clock, 0}).first->second;
    if (evict > 0 && clock - it.seen > evict) it.times = 0;
    it.seen = clock;
    it.times += times;
  }
};

CASE("a directory admits and evicts as a plain one does") {
  for (const int64_t admit : {1, 3})
    for (const int64_t evict : {0, 1, 7}) {
      rows::RowDirectory directory(static_cast<uint64_t>(admit), static_cast<uint64_t>(evict));
      PlainDirectory plain{admit, evict, {}};
      std::mt19937_64 random(static_cast<unsigned>(7 * admit + evict));
      std::map<int64_t, Index> row_of;
      for (int64_t clock = 0; clock < 300; ++clock) {
        // The popular ids change with time, so that others are forgotten.
        const auto ids = some_ids(random() % 40, 200, static_cast<unsigned>(random()));
        std::vector<int64_t> shifted, times;
        for (const int64_t id : ids) {
          shifted.push_back(id + 20 * (clock / 10) - 100);
          times.push_back(static_cast<int64_t>(random() % 3));
        }
        const auto found = directory.look_up(shifted, times, clock);
        for (std::size_t i = 0; i < ids.size(); ++i)
          if (times[i] > 0) plain.occur(shifted[i], times[i], clock);
        for (std::size_t i = 0; i < found.new_ids.size(); ++i) row_of[found.new_ids[i]] = found.new_rows[i];
        for (std::size_t i = 0; i < ids.size(); ++i) {
          CHECK_EQ(found.rows[i] >= 0, plain.has(shifted[i], clock));
          if (found.rows[i] >= 0) CHECK_EQ(found.rows[i], row_of[shifted[i]]);
          CHECK(found.rows[i] < static_cast<Index>(directory.capacity()));
        }
        std::set<Index> taken;
        std::size_t held = 0;
        for (const auto& it : directory.entries(clock)) {
          held += it.row >= 0;
          if (it.row >= 0) CHECK(taken.insert(it.row).second);
          CHECK_EQ(it.row >= 0, plain.has(it.id, clock));
          CHECK_EQ(it.times, plain.known[it.id].times);
        }
        CHECK_EQ(held, directory.count(clock));
      }
      // Rows are given back: far fewer than there were ids.
      if (evict == 1) CHECK(directory.capacity() < 200);
      rows::RowDirectory other(static_cast<uint64_t>(admit), static_cast<uint64_t>(evict));
      const auto entries = directory.entries(299);
      for (const auto& it : entries) CHECK_EQ(other.add(it) >= 0, it.row >= 0);
      CHECK_EQ(other.count(299), directory.count(299));
      CHECK_EQ(other.capacity(), other.count(299));
    }
}

CASE("a row that is filled is nearly normal, and its id's own") {
  std::vector<float> row(1 << 16), again(1 << 16), other(1 << 16);
  rows::fill_row(row.data(), row.size(), -77, 3, 1.0);
  rows::fill_row(again.data(), 100, -77, 3, 1.0);
  rows::fill_row(other.data(), other.size(), -76, 3, 1.0);
  CHECK(same(again.data(), std::vector<float>(row.begin(), row.begin() + 100)));
  const auto moments = [&](const std::vector<float>& x, const std::vector<float>& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0) / static_cast<double>(x.size());
  };
  CHECK(std::fabs(std::accumulate(row.begin(), row.end(), 0.0)) / static_cast<double>(row.size()) < 0.02);
  CHECK(std::fabs(moments(row, row) - 1) < 0.03);
  CHECK(std::fabs(moments(row, other)) < 0.02);
}

}  // namespace
}  // namespace ringdp

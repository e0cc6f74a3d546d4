// What the control groups of a process leave, read from hierarchies made of files.
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/memory_limit.h"
#include "testing.h"

namespace ringdp::testing {
namespace {

class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / "ringdp-XXXXXX") {
    std::string name = path_.string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }
  std::optional<int64_t> left(const std::string& membership) {
    return memory_left_in_groups(membership, path_.string());
  }

 private:
  std::filesystem::path path_;
};

using Left = std::optional<int64_t>;

}  // namespace

CASE("the tightest group counts, and what the file cache holds is free") {
  Folder root;
  root.write("a/b/memory.max", "max\n");
  root.write("a/b/memory.current", "900\n");
  root.write("a/b/memory.stat", "anon 100\ninactive_file 30\nactive_file 20\nshmem 7\n");
  CHECK(root.left("0::/a/b\n") == Left());
  root.write("a/memory.max", "1000\n");
  root.write("a/memory.current", "950\n");
  root.write("a/memory.stat", "anon 100\ninactive_file 30\nactive_file 20\nshmem 7\n");
  CHECK(root.left("0::/a/b\n") == Left(100));
  root.write("a/b/memory.max", "910\n");
  CHECK(root.left("0::/a/b\n") == Left(60));
  root.write("a/b/memory.max", "10\n");
  CHECK(root.left("0::/a/b\n") == Left(0));
}

CASE("the first version's files, among other hierarchies") {
  Folder root;
  root.write("memory/job/memory.limit_in_bytes", "5000\n");
  root.write("memory/job/memory.usage_in_bytes", "4000\n");
  root.write("memory/job/memory.stat", "inactive_file 900\ntotal_inactive_file 10\ntotal_active_file 5\n");
  CHECK(root.left("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n") == Left(1015));
  CHECK(root.left("4:hugetlb,memory:/job/inner\n") == Left(1015));
}

CASE("in a container, whose path is the host's, the root counts; without files nothing is known") {
  Folder root;
  CHECK(root.left("0::/\n") == Left());
  CHECK(root.left("") == Left());
  CHECK(root.left("nonsense\n:\n") == Left());
  root.write("memory.max", "100\n");
  root.write("memory.current", "40\n");
  CHECK(root.left("0::/docker/0123\n") == Left(60));
  CHECK(root.left("0::/../../elsewhere\n") == Left(60));
}

}  // namespace ringdp::testing

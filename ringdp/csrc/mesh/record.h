// Record: what a rank writes into the store, lines of "key=value". Values come from outside: readers check them.
// Value types, any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ringdp {

using Record = std::map<std::string, std::string>;

std::string write_record(const Record& record);  // line breaks in values become blanks
Record read_record(const std::string& text);

std::string field(const Record& record, const std::string& key);  // empty where it is missing
int64_t number(const std::string& text);                          // -1 if it is none

std::string join(const std::vector<std::string>& parts, const char* separator);
std::vector<std::string> split(const std::string& text, char separator);  // without empty parts

}  // namespace ringdp

// The algorithm tables as names and numbers: what a file of RINGDP_TUNING overrides (ringdp/config/tuning.py reads
// it), what ranks compare in the rendezvous, and what is logged. Value types, any thread.
#pragma once

#include <map>
#include <string>

#include "collective/algorithm_table.h"

namespace ringdp {

// "one_host.fold_sent_bytes" to bytes, "one_host.direct_ranks" to ranks; without a layout in front, for all layouts.
using TuningLimits = std::map<std::string, std::size_t>;

// The built-in tables with the values of `limits`. Throws Error(kValue) for an unknown name.
AlgorithmTables tables_from(const TuningLimits& limits);
TuningLimits limits_of(const AlgorithmTables& tables);

// All limits as "name=number" items, always in the same order: equal exactly when the tables are.
std::string tables_text(const AlgorithmTables& tables);

// One line for the log: the algorithms of an all-reduce of these ranks, and the source of the table.
std::string describe_all_reduce(const AlgorithmTables& tables, std::span<const int> hosts, const std::string& source);

}  // namespace ringdp

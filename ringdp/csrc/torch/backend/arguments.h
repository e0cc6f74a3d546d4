// Checks of the arguments of torch's collectives, with the messages of torch's own backends, which users' tests may
// match. They throw Error(kValue) that begins with "ProcessGroupRing::<what>: ". Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

#include "base/types.h"

namespace ringdp {

[[noreturn]] void refuse(const char* what, const std::string& why);

void require_reduction(const char* what, DType dtype, ReduceOp op);
void require_not_empty(const char* what, const std::vector<at::Tensor>& tensors);
void require_one(const char* what, const std::vector<at::Tensor>& tensors, const char* kind = "");  // kind: "input "
void require_root(const char* what, int64_t root, int world);
// The tensor at `index` of a list has the type and as many elements as `model`.
void require_like(const char* what, const at::Tensor& tensor, const at::Tensor& model, std::size_t index);
void require_all_like(const char* what, const std::vector<at::Tensor>& tensors, const at::Tensor& model);
// `whole` holds `parts` pieces of the size of `piece`.
void require_parts(const char* what, const at::Tensor& whole, const at::Tensor& piece, int parts,
                   const char* whole_name, const char* piece_name);
// The root of a gather or scatter passes one list with a tensor per rank, the other ranks none. `kind`: "output" or
// "input".
void require_root_list(const char* what, const std::vector<std::vector<at::Tensor>>& lists, bool root, int world,
                       const char* kind);

std::vector<std::span<std::byte>> cut(std::span<std::byte> whole, int parts);
// Cut along the first dimension into pieces of `rows[i]`, or equally if `rows` is empty.
std::vector<std::span<std::byte>> cut_rows(const char* what, const at::Tensor& tensor, std::span<std::byte> memory,
                                           const std::vector<int64_t>& rows, int parts);

}  // namespace ringdp

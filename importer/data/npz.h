// .npz: a zip archive of .npy members.
#pragma once

#include <filesystem>
#include <memory>

#include "importer/dataset.h"

namespace onnxddp {

std::unique_ptr<Dataset> open_npz(const std::filesystem::path& file);

}  // namespace onnxddp

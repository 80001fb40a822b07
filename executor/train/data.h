// From files of arrays to feeds: which array feeds which input, what the target looks like, batches of rows.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "executor/plan/session.h"
#include "executor/train/options.h"
#include "importer/dataset.h"

namespace ONNXDDP_API onnxddp {

/// The files of --data, or the model's neighbour STEM.npz; throws a usage Error when there is neither.
std::vector<std::filesystem::path> data_files(const std::vector<std::string>& given,
                                              const std::filesystem::path& model);
/// "a.npz and b.npz" for messages.
std::string file_list(const std::vector<std::filesystem::path>& files);

/// Which array feeds which input, by name.
struct ArrayMatch {
  std::vector<Column> inputs;         // one per graph input
  std::optional<std::size_t> target;  // index into the data set's arrays
  std::vector<std::size_t> extra;     // arrays that are neither
  DimBindings dims;                   // sizes of symbols other than the batch's, learned from rows
};
/// Throws Error for an input without an array or of another shape; a usage Error when several arrays could be
/// the target. `batch`: the symbol of the first dimension. `needs_target`: false leaves arrays without an
/// input alone.
ArrayMatch match_arrays(const Graph& graph, const Dataset& data, const std::string& target, bool needs_target,
                        const std::string& where);

/// What the targets hold, from all of them (or the first 16 million elements).
struct TargetScan {
  bool binary = false, one_hot = false;  // floats: only 0 and 1; one 1 in every row
  std::int64_t least = 0, greatest = 0, least_row = 0, greatest_row = 0;  // integers
};
TargetScan scan_target(const Dataset& data, std::size_t array);
/// Throws Error unless all labels are in 0..classes-1 or equal to `ignore`.
void check_labels(const Dataset& data, std::size_t array, std::int64_t classes,
                  std::optional<std::int64_t> ignore, const std::string& where);

/// The column of the target in the form that the loss reads: class indices i64 without the class axis, else
/// the output's own type and shape. What does not fit is left as it is: attach_loss explains.
Column target_column(const ArrayInfo& info, std::size_t array, const std::string& loss,
                     const OptionMap& options, const TensorType& output, const DimBindings& dims);
/// The class axis of `output` for class indices of `rows`, or -1.
std::int64_t find_class_axis(const Shape& output, const Ints& rows, const OptionMap& options,
                             const DimBindings& dims);

/// Rows of a data set as feeds. Small data is converted once and kept. Thread-compatible.
class BatchSource {
 public:
  /// `rows`: the subset to use, in this order; empty: all.
  BatchSource(std::shared_ptr<const Dataset> data, std::vector<Column> columns,
              std::vector<std::int64_t> rows = {});
  std::int64_t size() const;
  /// Feeds of the rows at these positions of the subset.
  Feeds batch(std::span<const std::int64_t> positions) const;
  bool cached() const { return !cache_.empty(); }
  std::size_t row_bytes() const;
  const Dataset& data() const { return *data_; }
  const std::vector<Column>& columns() const { return columns_; }

 private:
  std::shared_ptr<const Dataset> data_;
  std::vector<Column> columns_;
  std::vector<std::int64_t> rows_;
  std::vector<HostTensor> cache_;
};

}  // namespace onnxddp

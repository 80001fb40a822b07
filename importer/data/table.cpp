#include "importer/data/table.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

namespace onnxddp {
namespace {

/// Rows by array, for checks and their messages.
struct Count {
  std::string name, place;
  std::int64_t rows;
};

void check_counts(const std::vector<Count>& counts) {
  std::map<std::string, const Count*> seen;
  for (const Count& c : counts) {
    if (const auto [other, fresh] = seen.emplace(c.name, &c); !fresh) {
      throw Error(cat("two arrays have the name ", in_quotes(c.name)))
          .in(cat(other->second->place, "; ", c.place))
          .hint("arrays are matched to inputs by name: rename or leave out one of them");
    }
    if (c.rows != counts.front().rows) {
      throw Error(cat("arrays have different numbers of rows: ", in_quotes(counts.front().name), " has ",
                      counts.front().rows, ", ", in_quotes(c.name), " has ", c.rows))
          .in(c.place)
          .hint("every array needs one row per sample on its first axis");
    }
  }
}

template <class Bits>
void swap_bytes(std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(Bits)) std::reverse(data + i, data + i + sizeof(Bits));
}

/// Index of the first NaN or infinity, or -1. `mask` holds the exponent's bits.
template <class Bits>
std::int64_t first_special(const std::byte* data, std::int64_t count, Bits mask) {
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + static_cast<std::size_t>(i) * sizeof bits, sizeof bits);
    if ((bits & mask) == mask) return i;
  }
  return -1;
}

std::int64_t first_special(const HostTensor& t) {
  switch (t.dtype()) {
    case DType::f32: return first_special<std::uint32_t>(t.raw(), t.numel(), 0x7f800000U);
    case DType::f64: return first_special<std::uint64_t>(t.raw(), t.numel(), 0x7ff0000000000000ULL);
    case DType::f16: return first_special<std::uint16_t>(t.raw(), t.numel(), 0x7c00U);
    default: return -1;
  }
}

std::string hex(XXH128_hash_t hash) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text;
}

class Table : public Dataset {
 public:
  explicit Table(std::vector<Array> arrays) : arrays_(std::move(arrays)) {
    for (const Array& a : arrays_) infos_.push_back(a.info);
  }

  std::int64_t size() const override { return arrays_.front().rows; }
  const std::vector<ArrayInfo>& arrays() const override { return infos_; }

  HostTensor read(std::size_t array, std::span<const std::int64_t> indices) const override {
    CHECK(array < arrays_.size());
    const Array& a = arrays_[array];
    Ints shape = a.info.row_shape;
    shape.insert(shape.begin(), static_cast<std::int64_t>(indices.size()));
    HostTensor out(a.info.dtype, std::move(shape));
    if (indices.empty()) return out;
    std::byte* data = out.mutable_raw();
    const std::size_t row_bytes = out.bytes() / indices.size();
    for (std::size_t i = 0; i < indices.size();) {
      std::size_t run = 1;  // neighbours are one read
      while (i + run < indices.size() && indices[i + run] == indices[i] + static_cast<std::int64_t>(run))
        ++run;
      CHECK(indices[i] >= 0 && indices[i + run - 1] < a.rows, "row ", indices[i], " of ", a.rows);
      a.bytes.read(static_cast<std::uint64_t>(indices[i]) * row_bytes, data + i * row_bytes, run * row_bytes);
      i += run;
    }
    if (a.swapped) swap(data, out.bytes(), dtype_size(a.info.dtype));
    check_finite(a, out, indices);
    return out;
  }

  std::string fingerprint() const override {
    std::string text = "table 1\n";
    for (const Array& a : arrays_) {
      text += cat(a.info.name, ' ', dtype_name(a.info.dtype), a.swapped ? " swapped " : " ", a.rows, ' ',
                  shape_str(a.info.row_shape), ' ', sampled_hash(a.bytes), '\n');
    }
    return xxh3_hex(text);
  }

 private:
  static void swap(std::byte* data, std::size_t bytes, std::size_t element) {
    if (element == 2) swap_bytes<std::uint16_t>(data, bytes);
    if (element == 4) swap_bytes<std::uint32_t>(data, bytes);
    if (element == 8) swap_bytes<std::uint64_t>(data, bytes);
  }

  static void check_finite(const Array& a, const HostTensor& t, std::span<const std::int64_t> indices) {
    const std::int64_t bad = first_special(t);
    if (bad < 0) return;
    const std::int64_t per_row = t.numel() / static_cast<std::int64_t>(indices.size());
    const char* kind = std::isnan(t.as_double(bad)) ? "NaN" : "an infinity";
    throw Error(cat("the data holds ", kind, ": array ", in_quotes(a.info.name), ", row ",
                    indices[static_cast<std::size_t>(bad / per_row)]))
        .at(cat("element ", bad % per_row, " of the row"))
        .in(a.place)
        .hint("clean the data, or leave that row out (rows count from 0)");
  }

  /// Up to 64 evenly spaced blocks of 4 KiB; everything if it is not more.
  static std::string sampled_hash(const Bytes& bytes) {
    constexpr std::uint64_t kBlock = 4096, kBlocks = 64;
    std::string sample;
    if (bytes.size <= kBlock * kBlocks) {
      sample.resize(bytes.size);
      bytes.read(0, reinterpret_cast<std::byte*>(sample.data()), sample.size());
    } else {
      sample.resize(kBlock * kBlocks);
      const std::uint64_t stride = (bytes.size - kBlock) / (kBlocks - 1);
      for (std::uint64_t i = 0; i < kBlocks; ++i) {
        const std::uint64_t from = i + 1 == kBlocks ? bytes.size - kBlock : i * stride;
        bytes.read(from, reinterpret_cast<std::byte*>(sample.data()) + i * kBlock, kBlock);
      }
    }
    return xxh3_hex(sample);
  }

  std::vector<Array> arrays_;
  std::vector<ArrayInfo> infos_;
};

class Joined : public Dataset {
 public:
  explicit Joined(std::vector<std::unique_ptr<Dataset>> parts) : parts_(std::move(parts)) {
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t a = 0; a < parts_[p]->arrays().size(); ++a) {
        infos_.push_back(parts_[p]->arrays()[a]);
        where_.emplace_back(p, a);
      }
    }
  }

  std::int64_t size() const override { return parts_.front()->size(); }
  const std::vector<ArrayInfo>& arrays() const override { return infos_; }
  HostTensor read(std::size_t array, std::span<const std::int64_t> indices) const override {
    CHECK(array < where_.size());
    const auto [part, local] = where_[array];
    return parts_[part]->read(local, indices);
  }
  std::string fingerprint() const override {
    std::string text;
    for (const auto& part : parts_) text += part->fingerprint();
    return xxh3_hex(text);
  }

 private:
  std::vector<std::unique_ptr<Dataset>> parts_;
  std::vector<ArrayInfo> infos_;
  std::vector<std::pair<std::size_t, std::size_t>> where_;
};

}  // namespace

std::string xxh3_hex(std::string_view text) { return hex(XXH3_128bits(text.data(), text.size())); }

std::unique_ptr<Dataset> make_table(std::vector<Array> arrays, const std::string& file) {
  if (arrays.empty()) throw Error(cat(file, " holds no arrays")).in(file);
  std::vector<Count> counts;
  for (const Array& a : arrays) {
    if (a.rows == 0) throw Error(cat("array ", in_quotes(a.info.name), " has no rows")).in(a.place);
    if (a.bytes.size == 0) {
      throw Error(cat("the rows of array ", in_quotes(a.info.name), " have no elements"))
          .at(cat(in_quotes(a.info.name), ": row shape ", shape_str(a.info.row_shape)))
          .in(a.place);
    }
    counts.push_back({a.info.name, a.place, a.rows});
  }
  check_counts(counts);
  return std::make_unique<Table>(std::move(arrays));
}

std::unique_ptr<Dataset> join(std::vector<std::unique_ptr<Dataset>> parts) {
  std::vector<Count> counts;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (const ArrayInfo& a : parts[p]->arrays())
      counts.push_back({a.name, cat("data file ", p + 1), parts[p]->size()});
  }
  check_counts(counts);
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<Joined>(std::move(parts));
}

}  // namespace onnxddp

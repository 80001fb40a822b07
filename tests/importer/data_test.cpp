// Data sets: hand-made .npy and .npz bytes, good and bad, and files exchanged with NumPy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>

#include "importer/dataset.h"

namespace onnxddp {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string little(std::uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i, value >>= 8) out += static_cast<char>(value & 0xff);
  return out;
}

std::string npy_raw(const std::string& dict, const std::string& elements, int version = 1) {
  const std::string text = dict + "\n";
  return "\x93NUMPY" + little(static_cast<unsigned>(version), 1) + little(0, 1) +
         little(text.size(), version == 1 ? 2 : 4) + text + elements;
}

std::string npy(const std::string& descr, const std::string& shape, const std::string& elements,
                bool fortran = false) {
  return npy_raw("{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") +
                     ", 'shape': " + shape + ", }",
                 elements);
}

std::string deflated(const std::string& bytes) {
  z_stream z{};
  deflateInit2(&z, 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&z, bytes.size()), '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  z.avail_in = static_cast<uInt>(bytes.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  deflate(&z, Z_FINISH);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

/// A member and the lies about it.
struct Member {
  std::string name, bytes;
  bool pack = false;
  std::optional<std::uint64_t> size = {}, stored = {}, offset = {};
  std::optional<std::uint32_t> crc = {};
  unsigned method = 99, flags = 0;
  bool zip64 = false;
};

std::string zip(const std::vector<Member>& members, const std::string& comment = "", bool end64 = false) {
  std::string out, directory;
  for (const Member& m : members) {
    const std::string data = m.pack ? deflated(m.bytes) : m.bytes;
    const auto crc = m.crc.value_or(static_cast<std::uint32_t>(
        crc32(0, reinterpret_cast<const Bytef*>(m.bytes.data()), static_cast<uInt>(m.bytes.size()))));
    const std::uint64_t stored = m.stored.value_or(data.size()), size = m.size.value_or(m.bytes.size()),
                        offset = m.offset.value_or(out.size());
    const unsigned method = m.method == 99 ? (m.pack ? 8 : 0) : m.method;
    const std::uint64_t none = 0xffffffff;
    const auto common = [&] {
      return little(20, 2) + little(m.flags, 2) + little(method, 2) + little(0x210000, 4) + little(crc, 4) +
             little(m.zip64 ? none : stored, 4) + little(m.zip64 ? none : size, 4) + little(m.name.size(), 2);
    };
    const std::string extra = m.zip64
                                  ? little(0x7777, 2) + little(1, 2) + "x" + little(1, 2) + little(24, 2) +
                                        little(size, 8) + little(stored, 8) + little(offset, 8)
                                  : "";
    directory += little(0x02014b50, 4) + little(20, 2) + common() + little(extra.size(), 2) + little(0, 10) +
                 little(m.zip64 ? none : offset, 4) + m.name + extra;
    out += little(0x04034b50, 4) + common() + little(extra.size(), 2) + m.name + extra + data;
  }
  const std::uint64_t start = out.size(), count = members.size();
  out += directory;
  if (end64) {
    const std::uint64_t record = out.size();
    out += little(0x06064b50, 4) + little(44, 8) + little(45, 2) + little(45, 2) + little(0, 8) +
           little(count, 8) + little(count, 8) + little(directory.size(), 8) + little(start, 8);
    out += little(0x07064b50, 4) + little(0, 4) + little(record, 8) + little(1, 4);
  }
  return out + little(0x06054b50, 4) + little(0, 4) + little(end64 ? 0xffff : count, 2) +
         little(end64 ? 0xffff : count, 2) + little(end64 ? 0xffffffff : directory.size(), 4) +
         little(end64 ? 0xffffffff : start, 4) + little(comment.size(), 2) + comment;
}

class Data : public ::testing::Test {
 protected:
  Data() {
    char name[] = "/tmp/onnxddp-data-XXXXXX";
    folder_ = ::mkdtemp(name);
  }
  ~Data() override { fs::remove_all(folder_); }

  fs::path file(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  std::unique_ptr<Dataset> open(const std::string& name, const std::string& bytes) {
    return open_dataset({file(name, bytes)});
  }
  static std::string error_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), 1);
      return error.report();
    }
    return "no error";
  }
  std::string error_of(const std::string& name, const std::string& bytes) {
    return error_of([&] { open(name, bytes); });
  }
  static std::vector<double> values(const HostTensor& t) {
    std::vector<double> out;
    for (std::int64_t i = 0; i < t.numel(); ++i) out.push_back(t.as_double(i));
    return out;
  }
  static HostTensor read(const Dataset& data, std::vector<std::int64_t> rows, std::size_t array = 0) {
    return data.read(array, rows);
  }

  fs::path folder_;
};

using Npy = Data;
using Npz = Data;
using Open = Data;
using Collate = Data;

const std::string kSix = bytes_of<float>({1, 2, 3, 4, 5, 6});

TEST_F(Npy, RowsComeInTheOrderAsked) {
  const auto data = open("image.npy", npy("<f4", "(3, 2)", kSix));
  EXPECT_EQ(data->size(), 3);
  EXPECT_EQ(data->arrays()[0].name, "image");
  EXPECT_EQ(data->arrays()[0].dtype, DType::f32);
  EXPECT_THAT(data->arrays()[0].row_shape, ElementsAre(2));
  EXPECT_EQ(read(*data, {2, 0, 1, 1}), HostTensor::of<float>({4, 2}, {5, 6, 1, 2, 3, 4, 3, 4}));
  EXPECT_EQ(read(*data, {}).shape(), (Ints{0, 2}));
  EXPECT_THROW(read(*data, {3}), InternalError);
  EXPECT_THROW(read(*data, {-1}), InternalError);
}

TEST_F(Npy, EveryDtypeInBothByteOrders) {
  struct Case {
    std::string descr, bytes;
    DType dtype;
    double value;
  };
  const std::vector<Case> cases = {{"|b1", {"\x01"}, DType::boolean, 1},
                                   {"|i1", {"\xfe"}, DType::i8, -2},
                                   {"|u1", {"\xfe"}, DType::u8, 254},
                                   {"<i2", {"\xfe\xff"}, DType::i16, -2},
                                   {">i2", {"\xff\xfe"}, DType::i16, -2},
                                   {"<u2", {"\x01\x02"}, DType::u16, 513},
                                   {">u2", {"\x01\x02"}, DType::u16, 258},
                                   {"<i4", little(-3, 4), DType::i32, -3},
                                   {">i4", {"\xff\xff\xff\xfd"}, DType::i32, -3},
                                   {"<u4", little(7, 4), DType::u32, 7},
                                   {"<i8", little(-9, 8), DType::i64, -9},
                                   {"<u8", little(9, 8), DType::u64, 9},
                                   {">i8", std::string(7, '\0') + '\x05', DType::i64, 5},
                                   {"<f2", std::string("\x00\x3e", 2), DType::f16, 1.5},
                                   {">f4", std::string("\x3f\xc0\0\0", 4), DType::f32, 1.5},
                                   {"<f8", bytes_of<double>({2.5}), DType::f64, 2.5},
                                   {">f8", std::string("\x40\x04\0\0\0\0\0\0", 8), DType::f64, 2.5}};
  for (const Case& c : cases) {
    const auto data = open("a.npy", npy(c.descr, "(1,)", c.bytes));
    EXPECT_EQ(data->arrays()[0].dtype, c.dtype) << c.descr;
    EXPECT_EQ(read(*data, {0}).as_double(0), c.value) << c.descr;
  }
}

TEST_F(Npy, ColumnMajorIsTurnedRound) {
  const auto data = open("a.npy", npy("<f4", "(3, 2)", bytes_of<float>({1, 3, 5, 2, 4, 6}), true));
  EXPECT_EQ(read(*data, {0, 1, 2}), HostTensor::of<float>({3, 2}, {1, 2, 3, 4, 5, 6}));
  std::vector<std::uint8_t> cube(24);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j)
      for (int k = 0; k < 4; ++k)
        cube[static_cast<std::size_t>(i + 2 * (j + 3 * k))] = static_cast<std::uint8_t>(100 * i + 10 * j + k);
  const auto three = open("b.npy", npy("|u1", "(2, 3, 4)", bytes_of(cube), true));
  EXPECT_EQ(read(*three, {1}), HostTensor::of<std::uint8_t>(
                                   {1, 3, 4}, {100, 101, 102, 103, 110, 111, 112, 113, 120, 121, 122, 123}));
}

TEST_F(Npy, HeadersOfAllVersionsAndSpellings) {
  for (const int version : {1, 2, 3}) {
    const auto data =
        open("a.npy", npy_raw("{\"shape\":(3,2),'fortran_order':False , 'descr':\"<f4\"}   ", kSix, version));
    EXPECT_EQ(data->size(), 3);
  }
  EXPECT_EQ(open("a.npy", npy("<f4", "(6L,)", kSix))->size(), 6);
}

TEST_F(Npy, DamagedHeadersAreErrors) {
  const auto dict = [&](const std::string& text) { return error_of("a.npy", npy_raw(text, kSix)); };
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 2)}"),
              HasSubstr("a dimension is negative"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}"),
              HasSubstr("a dimension is too large"));
  EXPECT_THAT(
      dict("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904)}"),
      HasSubstr("shape is too large"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904, 8)}"),
              HasSubstr("shape is too large"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"),
              HasSubstr("truncated: its header asks for 4000000000000 bytes"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}"), HasSubstr("too long"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (6)}"),
              HasSubstr("the shape is no tuple"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (6,), 'x': 1}"),
              HasSubstr("unexpected or repeated key 'x'"));
  EXPECT_THAT(dict("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (6,)}"),
              HasSubstr("repeated key"));
  EXPECT_THAT(dict("{'descr': '<f4', 'shape': (6,)}"), HasSubstr("is missing"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': 0, 'shape': (6,)}"),
              HasSubstr("True or False expected"));
  EXPECT_THAT(dict("{'descr': '<f4"), HasSubstr("a string without end"));
  EXPECT_THAT(dict("{'descr' '<f4'}"), HasSubstr("':' expected"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}"),
              HasSubstr("',' or ')' expected"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1)}"),
              HasSubstr("more than 16"));
  EXPECT_THAT(dict("{'descr': '<f4', 'fortran_order': False, 'shape': (6,)} x"),
              HasSubstr("text behind the dict"));
  EXPECT_THAT(dict("\x1b[31m"), Not(HasSubstr("\x1b")));
}

TEST_F(Npy, EveryTruncationIsAnError) {
  const std::string whole = npy("<f4", "(3, 2)", kSix);
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(error_of("a.npy", whole.substr(0, size)), "no error") << size;
  EXPECT_THAT(error_of("a.npy", "PK\3\4 something else"), HasSubstr("this is no .npy file"));
  EXPECT_THAT(error_of("a.npy", npy_raw("{}", "", 4)), HasSubstr("version 4 is unknown"));
  EXPECT_THAT(error_of("a.npy", std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12)),
              HasSubstr("claims 4294967295 bytes"));
}

TEST_F(Npy, UnsupportedDtypesNameARemedy) {
  const auto dtype = [&](const std::string& descr) { return error_of("a.npy", npy(descr, "(1,)", "x")); };
  EXPECT_THAT(dtype("|O"), HasSubstr("Python objects"));
  EXPECT_THAT(dtype("<U7"), HasSubstr("strings"));
  EXPECT_THAT(dtype("|S7"), HasSubstr("return_inverse"));
  EXPECT_THAT(dtype("<V2"), HasSubstr("bfloat16"));
  EXPECT_THAT(dtype("<c8"), HasSubstr("complex"));
  EXPECT_THAT(dtype("<M8[ns]"), HasSubstr("astype(numpy.int64)"));
  EXPECT_THAT(dtype("<f16"), HasSubstr("unsupported type"));
  EXPECT_THAT(dtype("|f4"), HasSubstr("unsupported type"));
  EXPECT_THAT(dtype(""), HasSubstr("unsupported type"));
  EXPECT_THAT(
      error_of("a.npy", npy_raw("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "")),
      HasSubstr("each field"));
}

TEST_F(Npy, NoRowsNoElementsNoAxis) {
  EXPECT_THAT(error_of("a.npy", npy("<f4", "(0, 3)", "")), HasSubstr("array 'a' has no rows"));
  EXPECT_THAT(error_of("a.npy", npy("<f4", "(3, 0)", "")), HasSubstr("have no elements"));
  EXPECT_THAT(error_of("a.npy", npy("<f4", "()", "1234")), HasSubstr("no sample axis"));
}

TEST_F(Npy, NanAndInfinityNameFileArrayAndRow) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto data = open("x.npy", npy("<f4", "(3, 2)", bytes_of<float>({1, 2, 3, 4, NAN, -inf})));
  EXPECT_EQ(read(*data, {1, 0}).numel(), 4);
  const std::string report = error_of([&] { read(*data, {0, 2, 1}); });
  EXPECT_THAT(report, HasSubstr("the data holds NaN: array 'x', row 2"));
  EXPECT_THAT(report, HasSubstr((folder_ / "x.npy").string()));
  EXPECT_THAT(report, HasSubstr("element 0 of the row"));
  const auto wide = open("y.npy", npy(">f8", "(1,)", std::string("\xff\xf0\0\0\0\0\0\0", 8)));
  EXPECT_THAT(error_of([&] { read(*wide, {0}); }), HasSubstr("an infinity: array 'y', row 0"));
  const auto half = open("z.npy", npy("<f2", "(2,)", std::string("\x00\x3c\x00\x7c", 4)));
  EXPECT_THAT(error_of([&] { read(*half, {1}); }), HasSubstr("an infinity: array 'z', row 1"));
  EXPECT_EQ(read(*open("i.npy", npy("<i4", "(1,)", "\xff\xff\xff\x7f")), {0}).as_int(0), 0x7fffffff);
}

TEST_F(Npy, FileThatShrinksIsAnError) {
  const auto data = open("a.npy", npy("<f4", "(3, 2)", kSix));
  fs::resize_file(folder_ / "a.npy", fs::file_size(folder_ / "a.npy") - 8);
  EXPECT_EQ(read(*data, {1}).numel(), 2);
  EXPECT_THAT(error_of([&] { read(*data, {2}); }), HasSubstr("truncated, or changed"));
}

TEST_F(Npz, StoredAndDeflatedMembersReadAlike) {
  const std::string x = npy("<f4", "(3, 2)", kSix), y = npy("<i8", "(3,)", bytes_of<std::int64_t>({7, 8, 9}));
  std::vector<std::string> fingerprints;
  for (const bool pack : {false, true}) {
    for (const bool zip64 : {false, true}) {
      const auto data =
          open("d.npz", zip({{"x.npy", x, pack, {}, {}, {}, {}, 99, 0, zip64}, {"y.npy", y, pack}},
                            "a comment PK\5\6", zip64));
      ASSERT_EQ(data->arrays().size(), 2U);
      EXPECT_EQ(data->size(), 3);
      EXPECT_EQ(read(*data, {2, 1}, 0), HostTensor::of<float>({2, 2}, {5, 6, 3, 4}));
      EXPECT_EQ(read(*data, {2, 0}, 1), HostTensor::of<std::int64_t>({2}, {9, 7}));
      fingerprints.push_back(data->fingerprint());
    }
  }
  for (const auto& f : fingerprints) EXPECT_EQ(f, fingerprints[0]);
  EXPECT_EQ(fingerprints[0].size(), 32U);
}

TEST_F(Npz, EveryTruncationIsAnError) {
  const std::string whole =
      zip({{"x.npy", npy("<f4", "(3, 2)", kSix)}, {"y.npy", npy("|u1", "(3,)", "abc"), true}});
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(error_of("a.npz", whole.substr(0, size)), "no error") << size;
  EXPECT_THAT(error_of("a.npz", whole.substr(0, whole.size() - 1)), HasSubstr("truncated"));
}

TEST_F(Npz, FlippedBitsNeverCrash) {
  const std::string whole = zip({{"x.npy", npy("<f4", "(3, 2)", kSix), true},
                                 {"y.npy", npy("|u1", "(3,)", "abc"), false, {}, {}, {}, {}, 99, 0, true}},
                                "", true);
  int refused = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string bytes = whole;
    bytes[i] = static_cast<char>(bytes[i] ^ (1 << i % 8));
    try {
      const auto data = open("a.npz", bytes);
      for (std::size_t a = 0; a < data->arrays().size(); ++a) {
        for (std::int64_t row = 0; row < data->size(); ++row) read(*data, {row}, a);
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 200);
}

TEST_F(Npz, LiesOfTheDirectoryAreFound) {
  const std::string x = npy("<f4", "(3, 2)", kSix);
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, true, x.size() + 4}})),
              HasSubstr("28 are there"));  // against the .npy header
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, true, {}, 20}})), HasSubstr("ends too early"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, true, {}, {}, {}, 1234}})), HasSubstr("checksum"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x + "tail", true, x.size()}})),
              HasSubstr("longer than the directory says"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, {}, 5}})), HasSubstr("two different sizes"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, 1 << 20, 1 << 20}})),
              HasSubstr("reaches behind its end"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, {}, {}, 1}})),
              HasSubstr("header of member 'x.npy' is missing"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, {}, {}, 1ULL << 40, {}, 99, 0, true}})),
              HasSubstr("behind its end"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x}, {"x.npy", x, false, {}, {}, 0}})), HasSubstr("overlap"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x}, {"x.npy", x}})), HasSubstr("two members 'x.npy'"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, {}, {}, {}, {}, 12}})),
              HasSubstr("packed by method 12"));
  EXPECT_THAT(error_of("a.npz", zip({{"x.npy", x, false, {}, {}, {}, {}, 99, 1}})), HasSubstr("encrypted"));
  EXPECT_THAT(error_of("a.npz", zip({{"notes.txt", "hi"}})), HasSubstr("'notes.txt' is no .npy array"));
  EXPECT_THAT(error_of("a.npz", zip({{"\x1b[2J.npy", "hi"}})), HasSubstr("'\\x1b[2J'"));
  EXPECT_THAT(error_of("a.npz", zip({})), HasSubstr("holds no arrays"));
  EXPECT_THAT(error_of("a.npz", "no zip at all"), HasSubstr("no .npz archive"));
}

TEST_F(Npz, BombsAreRefusedBeforeTheyAreUnpacked) {
  const std::string zeros = npy("|u1", "(120000000,)", std::string(120000000, '\0'));
  const fs::path bomb = file("bomb.npz", zip({{"x.npy", zeros, true}}));
  EXPECT_LT(fs::file_size(bomb), 1U << 20);
  EXPECT_THAT(error_of([&] { open_dataset({bomb}); }), HasSubstr("would unpack to 114.4 MiB"));
  EXPECT_THAT(
      error_of("terabyte.npz", zip({{"x.npy", "\x93NUMPY", true, 1ULL << 40, {}, {}, {}, 99, 0, true}})),
      HasSubstr("would unpack to 1.0 TiB"));
}

TEST_F(Npz, UnequalRowsAreAnError) {
  const std::string bytes = zip({{"x.npy", npy("<f4", "(3, 2)", kSix)}, {"y.npy", npy("|u1", "(2,)", "ab")}});
  EXPECT_THAT(error_of("a.npz", bytes), HasSubstr("'x' has 3, 'y' has 2"));
}

TEST_F(Open, JoinsFilesByName) {
  const auto x = file("x.npy", npy("<f4", "(3, 2)", kSix)),
             y = file("y.npz", zip({{"y.npy", npy("|u1", "(3,)", "abc")}}));
  const auto data = open_dataset({x, y});
  EXPECT_EQ(data->arrays()[1].name, "y");
  EXPECT_EQ(read(*data, {1}, 1).as_int(0), 'b');
  EXPECT_NE(data->fingerprint(), open_dataset({x})->fingerprint());
  EXPECT_THAT(error_of([&] {
                open_dataset({x, file("x.npz", zip({{"x.npy", npy("|u1", "(3,)", "abc")}}))});
              }),
              HasSubstr("two arrays have the name 'x'"));
  EXPECT_THAT(error_of([&] {
                open_dataset({x, file("z.npy", npy("|u1", "(2,)", "ab"))});
              }),
              HasSubstr("'x' has 3, 'z' has 2"));
}

TEST_F(Open, UnknownFormatsListTheKnown) {
  for (const char* name : {"data.csv", "data", "data.h5"}) {
    const std::string report = error_of(name, "1,2\n");
    EXPECT_THAT(report, HasSubstr(name));
    EXPECT_THAT(report, HasSubstr("formats: npz (.npz), npy (.npy)"));
  }
  EXPECT_EQ(open("UPPER.NPY", npy("|u1", "(2,)", "ab"))->size(), 2);
}

TEST_F(Open, WhatIsNoFileIsAnErrorAndNeverHangs) {
  EXPECT_THAT(error_of([&] { open_dataset({folder_ / "none.npz"}); }), HasSubstr("No such file"));
  fs::create_directory(folder_ / "folder.npy");
  EXPECT_THAT(error_of([&] { open_dataset({folder_ / "folder.npy"}); }), HasSubstr("it is a folder"));
  ASSERT_EQ(std::system(cat("mkfifo ", (folder_ / "pipe.npy").string()).c_str()), 0);
  EXPECT_THAT(error_of([&] { open_dataset({folder_ / "pipe.npy"}); }), HasSubstr("no regular file"));
  EXPECT_THAT(error_of([&] { open_dataset({}); }), HasSubstr("no data file"));
}

TEST_F(Open, FingerprintSeesContentsShapesAndNamesButNotThePlace) {
  std::vector<float> large(1 << 20);
  const auto write = [&](const std::string& name, const std::string& shape) {
    return open(name, npy("<f4", shape, bytes_of(large)))->fingerprint();
  };
  const std::string first = write("x.npy", "(1048576,)");
  EXPECT_EQ(write("x.npy", "(1048576,)"), first);
  EXPECT_NE(write("x.npy", "(524288, 2)"), first);
  EXPECT_NE(write("y.npy", "(1048576,)"), first);
  large.front() = 1;
  const std::string second = write("x.npy", "(1048576,)");
  EXPECT_NE(second, first);
  large.back() = 1;
  EXPECT_NE(write("x.npy", "(1048576,)"), second);
  fs::create_directory(folder_ / "sub");
  fs::copy(folder_ / "x.npy", folder_ / "sub/x.npy");
  EXPECT_EQ(open_dataset({folder_ / "sub/x.npy"})->fingerprint(),
            open_dataset({folder_ / "x.npy"})->fingerprint());
}

TEST_F(Collate, ConvertsToTheWantedTypes) {
  const auto data = open("d.npz", zip({{"a.npy", npy("<f8", "(2, 2)", bytes_of<double>({0.1, 2, 3, 4}))},
                                       {"b.npy", npy("|u1", "(2,)", std::string("\xff\x01", 2))},
                                       {"c.npy", npy("<i4", "(2, 1)", bytes_of<std::int32_t>({5, -6}))},
                                       {"d.npy", npy("<f2", "(2,)", std::string("\x00\x3e\x00\x3c", 4))}}));
  const std::vector<Column> columns = {{0, "a", DType::f32, {2}},
                                       {1, "b", DType::f32, {}},
                                       {2, "c", DType::i64, {}},
                                       {3, "d", DType::f32, {1}}};
  const std::vector<std::int64_t> rows = {1, 0};
  const auto batch = collate(*data, columns, rows);
  EXPECT_EQ(batch[0], HostTensor::of<float>({2, 2}, {3, 4, 0.1F, 2}));
  EXPECT_EQ(batch[1], HostTensor::of<float>({2}, {1, 255}));
  EXPECT_EQ(batch[2], HostTensor::of<std::int64_t>({2}, {-6, 5}));
  EXPECT_EQ(batch[3], HostTensor::of<float>({2, 1}, {1, 1.5}));
  EXPECT_EQ(conversion(data->arrays()[0], columns[0]), "f64 converted to f32");
  EXPECT_EQ(conversion(data->arrays()[2], columns[2]),
            "i32 converted to i64, each row of shape [1] is read as []");
  EXPECT_EQ(conversion(data->arrays()[1], {1, "b", DType::u8, {}}), "");
  EXPECT_EQ(collate(*data, columns, {})[0].shape(), (Ints{0, 2}));
}

TEST_F(Collate, RefusesWhatWouldChangeTheData) {
  const auto data =
      open("d.npz", zip({{"f.npy", npy("<f8", "(2, 3)", bytes_of<double>({1, 2, 3, 4, 1e300, 6}))},
                         {"i.npy", npy("<i8", "(2,)", bytes_of<std::int64_t>({1, 1LL << 40}))},
                         {"u.npy", npy("<u8", "(2,)", bytes_of<std::uint64_t>({1, 1ULL << 63}))}}));
  const std::vector<std::int64_t> rows = {0, 1};
  const auto error = [&](const Column& c) { return error_of([&] { collate(*data, {c}, rows); }); };
  EXPECT_THAT(error({0, "x", DType::i64, {3}}),
              HasSubstr("the data is f64, the model wants i64: array 'f', input 'x'"));
  EXPECT_THAT(error({0, "x", DType::boolean, {3}}), HasSubstr("the model wants bool"));
  EXPECT_THAT(error({0, "x", DType::f32, {3}}), HasSubstr("does not fit f32: row 1"));
  EXPECT_EQ(error({0, "x", DType::f64, {3}}), "no error");
  EXPECT_THAT(error({0, "x", DType::f64, {4}}), HasSubstr("'f': f64[3] a row, wanted: f64[4]"));
  EXPECT_THAT(error({0, "x", DType::f64, {}}), HasSubstr("shape does not fit"));
  EXPECT_EQ(error({0, "x", DType::f64, {1, 3}}), "no error");
  EXPECT_THAT(error({0, "x", DType::f64, {1, 3, 1}}), HasSubstr("shape does not fit"));
  EXPECT_THAT(error({1, "x", DType::i32, {}}), HasSubstr("does not fit i32: row 1"));
  EXPECT_THAT(error({1, "x", DType::boolean, {}}), HasSubstr("value 1099511627776"));
  EXPECT_THAT(error({2, "x", DType::i64, {}}), HasSubstr("does not fit i64: row 1"));
  EXPECT_EQ(error({1, "x", DType::f32, {}}), "no error");
}

TEST_F(Npz, WritingIsDeterministicAndReadsBack) {
  const std::vector<std::pair<std::string, HostTensor>> arrays = {
      {"x", HostTensor::of<float>({2, 3}, {1, 2, 3, 4, 5, 6})},
      {"mask", HostTensor::of<bool>({2}, {true, false})},
      {"layer.1/w", HostTensor::of<std::int64_t>({2, 1}, {-1, 1})}};
  const auto slurp = [](const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  write_npz(folder_ / "a.npz", arrays);
  write_npz(folder_ / "b.npz", arrays);
  EXPECT_EQ(slurp(folder_ / "a.npz"), slurp(folder_ / "b.npz"));
  const auto data = open_dataset({folder_ / "a.npz"});
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    EXPECT_EQ(data->arrays()[i].name, arrays[i].first);
    EXPECT_EQ(read(*data, {0, 1}, i), arrays[i].second);
  }
  EXPECT_THAT(error_of([&] { write_npz(folder_ / "none/a.npz", arrays); }), HasSubstr("cannot write"));
  EXPECT_THAT(error_of([&] {
                write_npz(folder_ / "c.npz", {{"h", HostTensor(DType::bf16, {1})}});
              }),
              HasSubstr("NumPy has no type for bf16"));
  EXPECT_THAT(error_of([&] {
                write_npz(folder_ / "c.npz", {arrays[0], arrays[0]});
              }),
              HasSubstr("two arrays"));
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 2U) << "nothing half-written is left";
}

TEST_F(Npz, ExchangesFilesWithNumpy) {
  const std::string python = ONNXDDP_PYTHON;
  if (python.empty()) GTEST_SKIP() << "no Python with NumPy: run scripts/deps.sh";
  const auto run = [&](const std::string& code) {
    std::ofstream(folder_ / "run.py") << "import numpy as np, warnings\n" << code;
    return std::system(cat("cd ", folder_.string(), " && ", python, " run.py").c_str());
  };
  ASSERT_EQ(
      run("r = np.random.default_rng(0)\n"
          "a = {'f': r.normal(size=(7, 3, 2)).astype('>f4'), 'o': np.asfortranarray(r.integers(-9, 9, (7, "
          "5))),\n"
          "     'h': np.arange(7, dtype='f2') / 2, 'b': np.arange(7) % 2 == 0, 'u': np.arange(7, "
          "dtype='u8')}\n"
          "np.savez('plain.npz', **a); np.savez_compressed('packed.npz', **a); np.save('o.npy', a['o'])\n"
          "np.save('f64.npy', a['f'].astype('f8')); np.save('sum.npy', np.array([[a[k].astype('f8').sum() "
          "for k in a]]))\n"),
      0);
  const std::vector<std::int64_t> rows = {0, 1, 2, 3, 4, 5, 6}, first = {0};
  const HostTensor sums = open_dataset({folder_ / "sum.npy"})->read(0, first);
  for (const char* name : {"plain.npz", "packed.npz"}) {
    const auto data = open_dataset({folder_ / name});
    ASSERT_EQ(data->arrays().size(), 5U);
    for (std::size_t a = 0; a < 5; ++a) {
      double sum = 0;
      for (const double v : values(data->read(a, rows))) sum += v;
      EXPECT_NEAR(sum, sums.as_double(static_cast<std::int64_t>(a)), 1e-5) << data->arrays()[a].name;
    }
    EXPECT_EQ(data->read(0, rows).cast(DType::f64), open_dataset({folder_ / "f64.npy"})->read(0, rows));
    EXPECT_EQ(data->read(1, rows), open_dataset({folder_ / "o.npy"})->read(0, rows));
  }
  write_npz(folder_ / "ours.npz", {{"x", HostTensor::of<float>({2, 3}, {1, 2, 3, 4, 5, 6})},
                                   {"s", HostTensor::scalar<double>(0.5)},
                                   {"m", HostTensor::of<bool>({2}, {true, false})},
                                   {"e", HostTensor(DType::i64, {0, 4})}});
  EXPECT_EQ(run("d = np.load('ours.npz'); assert d.files == ['x', 's', 'm', 'e'], d.files\n"
                "assert d['x'].dtype == 'f4' and (d['x'] == [[1, 2, 3], [4, 5, 6]]).all() and d['s'] == 0.5 "
                "and d['s'].shape == ()\n"
                "assert (d['m'] == [True, False]).all() and d['e'].shape == (0, 4) and d['e'].dtype == 'i8'\n"
                "import zipfile; assert zipfile.ZipFile('ours.npz').testzip() is None\n"),
            0);
}

}  // namespace
}  // namespace onnxddp

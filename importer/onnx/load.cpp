// Bytes and text -> a model that is known to be sound: size, protobuf, versions, structure, external data,
// ONNX's checker.
#include <fcntl.h>
#include <google/protobuf/io/coded_stream.h>
#include <onnx/checker.h>
#include <onnx/defs/parser.h>
#include <onnx/defs/schema.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

constexpr int kOldestOpset = 7;
constexpr int kOldestIr = 3;
constexpr int kRecursionLimit = 100;

int newest_opset() { return pb::OpSchemaRegistry::DomainToVersionRange::Instance().Map().at("").second; }

std::string read_file(const std::filesystem::path& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info {};
  if (fd < 0 || ::fstat(fd, &info) != 0) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    throw Error(cat("cannot open ", file.string(), ": ", std::strerror(error)));
  }
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};
  if (!S_ISREG(info.st_mode)) throw Error(cat(file.string(), " is not a file"));
  if (info.st_size == 0) throw Error(cat(file.string(), " is empty"));
  if (info.st_size > std::numeric_limits<std::int32_t>::max())
    throw Error(
        cat(file.string(), " has ", info.st_size, " bytes, more than the 2 GiB an ONNX file can have"))
        .hint("export with external_data=True");
  std::string bytes(static_cast<std::size_t>(info.st_size), '\0');
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::read(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw Error(
          cat("reading ", file.string(), " failed: ", n < 0 ? std::strerror(errno) : "it became shorter"));
    done += static_cast<std::size_t>(n);
  }
  return bytes;
}

bool looks_like_text(const std::string& bytes) {
  const std::size_t count = std::min<std::size_t>(bytes.size(), 512);
  return std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count), [](char c) {
    const auto u = static_cast<unsigned char>(c);
    return (u >= ' ' && u < 0xf5) || u == '\n' || u == '\r' || u == '\t';
  });
}

[[noreturn]] void not_a_model(const std::string& bytes, const std::string& name) {
  if (bytes.rfind("version https://git-lfs", 0) == 0)
    throw Error(cat(name, " is a Git LFS pointer, not the model itself")).hint("run `git lfs pull`");
  if (bytes.rfind("PK\x03\x04", 0) == 0)
    throw Error(cat(name, " is a zip archive (perhaps a PyTorch checkpoint), not an ONNX model"))
        .hint("export the model with torch.onnx.export");
  if (looks_like_text(bytes)) throw Error(cat(name, " is text, not an ONNX model"));
  throw Error(cat(name, " is not an ONNX model, or it is truncated or damaged"))
      .hint("export or copy it again");
}

void check_versions(const pb::ModelProto& model) {
  if (model.ir_version() < kOldestIr || model.ir_version() > pb::IR_VERSION)
    throw Error(cat("IR version ", model.ir_version(), " is not supported; versions ", kOldestIr, " to ",
                    static_cast<int>(pb::IR_VERSION), " are"));
  bool standard = false;
  for (const pb::OperatorSetIdProto& import : model.opset_import()) {
    const std::string domain = plain_domain(import.domain());
    if (domain.empty()) {
      standard = true;
      if (import.version() > newest_opset())
        throw Error(cat("opset ", import.version(), " is newer than ", newest_opset(),
                        ", the newest that this program knows"))
            .hint("export the model with a lower opset_version");
      if (import.version() < kOldestOpset)
        throw Error(cat("opset ", import.version(), " is older than ", kOldestOpset,
                        ", the oldest that this program reads"))
            .hint("convert the model with onnx.version_converter, or export it again");
    }
  }
  if (!standard)
    throw Error("the model does not say which version of the standard operators it uses (opset_import)");
}

std::string check_message(const std::exception& e) {
  std::string text = e.what();
  const std::size_t context = text.find("\n==> Context");
  if (context != std::string::npos) text.replace(context, 1, " ");
  return one_line(text);
}

void run_checker(const pb::ModelProto& model) {
  try {
    pb::checker::check_model(
        model, false, true);  // functions may use another opset than the graph: each is read by its own
  } catch (const std::exception& e) {  // the library throws several kinds
    throw Error(cat("the model breaks the ONNX standard: ", check_message(e)));
  }
}

void check_metadata(const pb::ModelProto& model) {
  std::set<std::string> keys;
  for (const pb::StringStringEntryProto& entry : model.metadata_props())
    if (!keys.insert(entry.key()).second)
      throw Error(cat("metadata key '", one_line(entry.key(), 60), "' occurs twice"));
}

std::string join(const std::vector<std::string>& parts, std::size_t most) {
  std::string out;
  for (std::size_t i = 0; i < std::min(parts.size(), most); ++i) out += (i ? ", " : "") + parts[i];
  if (parts.size() > most) out += cat(" and ", parts.size() - most, " more");
  return out;
}

std::shared_ptr<const OnnxModel> finish(pb::ModelProto proto, const std::string& name,
                                        const std::filesystem::path& folder) {
  auto model = std::make_shared<OnnxModel>();
  model->proto = std::move(proto);
  model->file = name;
  try {
    for (const pb::StringStringEntryProto& entry : model->proto.metadata_props())
      if (entry.key() == kStrippedKey) model->stripped = true;
    check_versions(model->proto);
    check_metadata(model->proto);
    check_structure(model->proto);
    load_external_data(model->proto, folder);
    for_each_tensor(model->proto, [&](const pb::TensorProto& tensor, const std::string& what) {
      check_payload(tensor, what, model->stripped);
    });
    const Flat flat = flatten(model->proto);
    if (!all_ops_known_to_onnx(flat)) {
      const std::vector<std::string> unknown = unknown_ops(flat);
      throw Error(cat(unknown.size(), unknown.size() == 1 ? " operator is" : " operators are",
                      " not known: ", join(unknown, 12)))
          .hint("custom operators need a function body in the model; export without them");
    }
    if (!model->stripped) run_checker(model->proto);
  } catch (Error& e) {
    e.add_in(name);
    throw;
  }
  return model;
}

}  // namespace

std::shared_ptr<const OnnxModel> load_onnx_bytes(const std::string& bytes, const std::string& name) {
  return load_onnx_bytes(bytes, name, {});
}

std::shared_ptr<const OnnxModel> load_onnx_bytes(const std::string& bytes, const std::string& name,
                                                 const std::filesystem::path& folder) {
  if (bytes.empty()) throw Error(cat(name, " is empty"));
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                                            static_cast<int>(bytes.size()));
  in.SetRecursionLimit(kRecursionLimit);
  pb::ModelProto proto;
  if (!proto.ParseFromCodedStream(&in) || !in.ConsumedEntireMessage() || !proto.has_graph() ||
      proto.ir_version() == 0)
    not_a_model(bytes, name);
  return finish(std::move(proto), name, folder);
}

std::shared_ptr<const OnnxModel> load_onnx(const std::filesystem::path& file) {
  const std::filesystem::path folder =
      file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  return load_onnx_bytes(read_file(file), file.filename().string(), folder);
}

std::shared_ptr<const OnnxModel> parse_onnx_text(const std::string& text) {
  pb::ModelProto proto;
  pb::OnnxParser parser(text);
  const auto status = parser.Parse(proto);
  if (!status.IsOK()) throw Error(cat("the text is not a model: ", one_line(status.ErrorMessage())));
  return finish(std::move(proto), "text", {});
}

}  // namespace onnxddp

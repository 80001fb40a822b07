// A checkpoint is a folder that appears under its name only when every byte of it is on the disk:
//   1 write each file into checkpoints/.tmp-STEP-RANDOM and fsync it
//   2 manifest.json last: sizes, checksums, and its own checksum
//   3 fsync the temporary folder
//   4 rename to checkpoints/step-STEP, never over another
//   5 fsync checkpoints/: now it survives a power cut
//   6 only then old ones go, renamed first, so that none is ever half there
// A kill or a power cut between any two calls leaves the earlier checkpoints as they were. Loading trusts
// nothing: names, sizes and checksums are compared with the manifest before a byte is used. The checksums
// guard against accidents, not against people.
#include "importer/checkpoint.h"

#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

namespace onnxddp {
namespace {

namespace fs_path = std::filesystem;
using nlohmann::json;

constexpr std::string_view kManifest = "manifest.json", kPrefix = "step-", kTemporary = ".tmp-",
                           kDeleted = ".del-";
constexpr int kFormatVersion = 1;
constexpr std::uint64_t kMaxManifest = 4U << 20;

std::string hash_of(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text;
}

std::string random_name() {
  std::random_device device;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", device(), device());
  return text;
}

std::string step_name(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step-%08lld", static_cast<long long>(step));
  return text;
}

/// The step of a checkpoint's folder name; nothing for any other spelling.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return {};
  std::int64_t step = 0;
  const std::string_view digits = name.substr(kPrefix.size());
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (status != std::errc() || end != digits.data() + digits.size() || step_name(step) != name) return {};
  return step;
}

bool is_file_name(std::string_view name) {
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= 64 && name.front() != '.' && name != kManifest &&
         std::all_of(name.begin(), name.end(), allowed);
}

struct Manifest {
  struct File {
    std::uint64_t bytes = 0;
    std::string hash;
    bool operator==(const File&) const = default;
  };
  std::int64_t step = 0;
  std::map<std::string, File> files;
};

Manifest manifest_of(const Checkpoint& checkpoint) {
  Manifest out{checkpoint.step, {}};
  for (const auto& [name, bytes] : checkpoint.files) out.files[name] = {bytes.size(), hash_of(bytes)};
  return out;
}

json manifest_body(const Manifest& manifest) {
  json files = json::array();
  for (const auto& [name, file] : manifest.files)
    files.push_back({{"name", name}, {"bytes", file.bytes}, {"xxh3_128", file.hash}});
  return {{"format", "onnx-ddp checkpoint"},
          {"version", kFormatVersion},
          {"step", manifest.step},
          {"files", files}};
}

std::string manifest_text(const Manifest& manifest) {
  json out = manifest_body(manifest);
  out["manifest_xxh3_128"] = hash_of(out.dump());
  return out.dump(2) + "\n";
}

/// Accepts exactly what manifest_text writes, so that no changed byte goes unnoticed. Throws Error.
Manifest parse_manifest(const std::string& text) {
  const json in = json::parse(text, nullptr, false);
  if (!in.is_object() || in.value("format", json()) != "onnx-ddp checkpoint")
    throw Error("manifest.json is damaged");
  if (const json version = in.value("version", json());
      version.is_number_integer() && version != kFormatVersion) {
    throw Error(
        cat("its format is version ", version.dump(), ", this program reads version ", kFormatVersion));
  }
  Manifest out;
  try {
    out.step = in.at("step").get<std::int64_t>();
    for (const json& f : in.at("files")) {
      out.files[f.at("name").get<std::string>()] = {f.at("bytes").get<std::uint64_t>(),
                                                    f.at("xxh3_128").get<std::string>()};
    }
  } catch (const json::exception&) {
    throw Error("manifest.json is damaged");
  }
  if (manifest_text(out) != text) throw Error("manifest.json is damaged: its checksum does not hold");
  for (const auto& [name, file] : out.files) {
    if (!is_file_name(name)) throw Error("manifest.json names a file outside the checkpoint");
  }
  return out;
}

/// The manifest of a folder in which the named files lie, with their sizes. Reads no file but the manifest.
Manifest read_manifest(const FileSystem& fs, const fs_path::path& folder) {
  const fs_path::path path = folder / kManifest;
  const std::vector<std::string> names = fs.list(folder);  // refuses links
  const auto has = [&](std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (!has(kManifest)) throw Error("manifest.json is missing: it was never finished");
  if (fs.file_size(path) > kMaxManifest) throw Error("manifest.json is damaged: too large");
  Manifest out = parse_manifest(fs.read_file(path));
  if (folder.filename() != step_name(out.step))
    throw Error(cat("it is the checkpoint of step ", out.step, " under another name"));
  for (const auto& [name, file] : out.files) {
    if (!has(name)) throw Error(name + " is missing");
    if (const std::uint64_t size = fs.file_size(folder / name); size != file.bytes) {
      throw Error(cat(name, " has ", size, " bytes, the manifest says ", file.bytes));
    }
  }
  return out;
}

/// read_checkpoint, for messages that name the folder themselves.
Checkpoint read_whole(const FileSystem& fs, const fs_path::path& folder) {
  const Manifest manifest = read_manifest(fs, folder);
  Checkpoint out{manifest.step, {}};
  for (const auto& [name, file] : manifest.files) {
    std::string bytes = fs.read_file(folder / name);
    if (bytes.size() != file.bytes || hash_of(bytes) != file.hash) {
      throw Error(name + " is damaged: its checksum does not hold");
    }
    out.files[name] = std::move(bytes);
  }
  return out;
}

/// Steps that have a folder, newest first.
std::vector<std::int64_t> list_steps(const FileSystem& fs, const fs_path::path& parent) {
  std::vector<std::int64_t> out;
  if (!fs.exists(parent)) return out;
  for (const std::string& name : fs.list(parent)) {
    if (const auto step = step_of(name)) out.push_back(*step);
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

/// Leftovers of a killed run. Only what this protocol names so, while the lock is held.
void remove_leftovers(FileSystem& fs, const fs_path::path& parent, std::vector<std::string>& warnings) {
  for (const std::string& name : fs.list(parent)) {
    if (!name.starts_with(kTemporary) && !name.starts_with(kDeleted)) continue;
    try {
      fs.remove_all(parent / name);
    } catch (const Error& error) {
      warnings.push_back(cat("cannot remove ", (parent / name).string(), ": ", error.what()));
    }
  }
}

/// Renamed first, on the disk too: a half removed folder must never lie under a checkpoint's name.
void remove_folder(FileSystem& fs, const fs_path::path& folder) {
  const fs_path::path doomed = folder.parent_path() / (std::string(kDeleted) + random_name());
  fs.rename_new(folder, doomed);
  fs.sync_directory(folder.parent_path());
  fs.remove_all(doomed);
}

void remove_old(FileSystem& fs, const fs_path::path& parent, int keep, std::vector<std::string>& warnings) {
  int whole = 0;
  for (const std::int64_t step : list_steps(fs, parent)) {
    const fs_path::path folder = parent / step_name(step);
    try {
      const Manifest manifest = read_manifest(fs, folder);
      if (++whole <= std::max(keep, 1)) continue;
      if (fs.list(folder).size() != manifest.files.size() + 1) {
        warnings.push_back(
            cat(folder.string(), " is kept: it holds files that are not part of the checkpoint"));
        continue;
      }
      remove_folder(fs, folder);
    } catch (const Error& error) {
      warnings.push_back(cat(folder.string(), " is not removed: ", error.what()));
    }
  }
}

/// True if the step is already there with the same contents. A torn one goes; a different one is an Error.
bool already_written(FileSystem& fs, const fs_path::path& folder, const Manifest& manifest) {
  if (!fs.exists(folder)) return false;
  std::optional<Checkpoint> found;
  try {
    found = read_whole(fs, folder);
  } catch (const Error&) {
    remove_folder(fs, folder);
    return false;
  }
  if (manifest_of(*found).files == manifest.files) return true;
  throw Error(cat("a different checkpoint of step ", manifest.step, " exists already"))
      .in(folder.string())
      .hint("remove or rename the folder, or give the run another --out");
}

void write_folder(FileSystem& fs, const fs_path::path& temporary, const Checkpoint& checkpoint,
                  const Manifest& manifest) {
  fs.create_directories(temporary);
  for (const auto& [name, bytes] : checkpoint.files) fs.write_file(temporary / name, bytes);
  fs.write_file(temporary / kManifest, manifest_text(manifest));
  fs.sync_directory(temporary);
}

void remove_quietly(FileSystem& fs, const fs_path::path& path) {
  try {
    fs.remove_all(path);
  } catch (const Error&) {  // the error that brought us here counts; the next save tries again
  }
}

}  // namespace

fs_path::path checkpoint_folder(const fs_path::path& run, std::int64_t step) {
  return run / "checkpoints" / step_name(step);
}

std::vector<std::string> write_checkpoint(FileSystem& fs, const fs_path::path& run,
                                          const Checkpoint& checkpoint, int keep) {
  CHECK(checkpoint.step >= 0);
  for (const auto& [name, bytes] : checkpoint.files) CHECK(is_file_name(name), name);
  const fs_path::path parent = run / "checkpoints", folder = checkpoint_folder(run, checkpoint.step);
  const Manifest manifest = manifest_of(checkpoint);
  std::vector<std::string> warnings;
  if (!fs.exists(parent)) {
    fs.create_directories(parent);
    fs.sync_directory(run);
  }
  remove_leftovers(fs, parent, warnings);
  if (!already_written(fs, folder, manifest)) {
    const fs_path::path temporary =
        parent / cat(kTemporary, step_name(checkpoint.step).substr(kPrefix.size()), '-', random_name());
    try {
      write_folder(fs, temporary, checkpoint, manifest);
      fs.rename_new(temporary, folder);
    } catch (...) {
      remove_quietly(fs, temporary);
      throw;
    }
    fs.sync_directory(parent);
  }
  remove_old(fs, parent, keep, warnings);
  return warnings;
}

std::optional<Checkpoint> newest_checkpoint(const FileSystem& fs, const fs_path::path& run,
                                            std::vector<std::string>* skipped) {
  const fs_path::path parent = run / "checkpoints";
  for (const std::int64_t step : list_steps(fs, parent)) {
    try {
      return read_whole(fs, parent / step_name(step));
    } catch (const Error& error) {
      if (skipped != nullptr)
        skipped->push_back(cat((parent / step_name(step)).string(), ": ", error.what()));
    }
  }
  return {};
}

Checkpoint read_checkpoint(const FileSystem& fs, const fs_path::path& folder) {
  const fs_path::path plain = folder.has_filename() ? folder : folder.parent_path();  // "step-1/"
  if (!fs.exists(plain)) throw Error(cat("there is no checkpoint ", plain.string()));
  try {
    return read_whole(fs, plain);
  } catch (const Error& error) {
    throw Error(cat("the checkpoint cannot be used: ", error.what()))
        .in(plain.string())
        .hint("--resume auto takes the newest whole checkpoint of a run");
  }
}

void replace_file(FileSystem& fs, const fs_path::path& path, const std::string& bytes) {
  // One name a file: what a killed run leaves behind goes with the next attempt.
  const fs_path::path temporary = path.parent_path() / cat('.', path.filename().string(), ".tmp");
  fs.remove_all(temporary);
  try {
    fs.write_file(temporary, bytes);
    fs.rename(temporary, path);
  } catch (...) {
    remove_quietly(fs, temporary);
    throw;
  }
  fs.sync_directory(path.parent_path().empty() ? "." : path.parent_path());
}

}  // namespace onnxddp

#!/usr/bin/env bash
# Installs what onnx-ddp needs on Debian 12 or later: distribution packages, the ONNX C++ library, oneDNN, and a Python environment for the checks of tests and demo.
#
# Safe to run again: each part is looked for first, and nothing is said when nothing is missing. What has to be built or unpacked lies under ${ONNXDDP_DEPS:-~/.cache/onnx-ddp}, outside the
# build folder, one folder a version; the links onnx, onednn and python name the ones in use, and CMakeLists.txt looks there after the system. A user who has the libraries needs no run.
set -euo pipefail

export HOME=${HOME:-~}
deps=${ONNXDDP_DEPS:-$HOME/.cache/onnx-ddp}
onnx_version=1.23.2
onednn_version=2023.2.0
python_pins=(numpy==2.4.6 onnx=="$onnx_version" onnxruntime==1.32.0)

packages=(
  cmake ninja-build ccache g++ pkg-config git ca-certificates
  libgloo-dev libasio-dev libssl-dev
  libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev
  zlib1g-dev libzip-dev libxxhash-dev libre2-dev
  protobuf-compiler libprotobuf-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  clang clang-format clang-tidy libomp-dev
  python3 python3-venv python3-pip
)

say() { printf 'deps: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Runs a command quietly; its output is shown only when it fails.
quietly() {
  local log=$work/log status=0
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if [ "$status" != 0 ]; then
    tail -n 40 "$log" >&2
    die "failed (exit $status): $*"
  fi
}

# True if the package is installed in at least this version.
installed_since() {
  local version
  version=$(dpkg-query -W -f='${db:Status-Abbrev}${Version}' "$1" 2>/dev/null) || return 1
  [[ $version == ii* ]] && dpkg --compare-versions "${version:3}" ge "$2"
}

missing_packages() {
  local have
  have=$(dpkg-query -W -f='${db:Status-Abbrev}${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^ii //p' || true)
  printf '%s\n' "${packages[@]}" | grep -vxF -e "$have" || true
}

install_packages() {
  command -v dpkg-query >/dev/null || die "this script knows Debian's packages only; elsewhere install by hand: ${packages[*]}"
  local missing
  mapfile -t missing < <(missing_packages)
  [ "${#missing[@]}" = 0 ] && return
  [ "$(id -u)" = 0 ] || die "run as root, or first: sudo apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  quietly apt-get update -q
  quietly apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# A cmake of at least 3.26, which the ONNX sources ask for; one from pip if the system's is older. Sets $new_cmake.
find_new_cmake() {
  new_cmake=$(command -v cmake)
  dpkg --compare-versions "$("$new_cmake" --version | sed -n '1s/.*version //p')" ge 3.26 && return
  quietly "$work/pip/bin/python" -m pip install -q 'cmake>=3.26,<4'
  new_cmake=$work/pip/bin/cmake
}

# build_onnx FOLDER: compiles the library from the source archive of the Python package and installs it as FOLDER.
build_onnx() {
  say "building ONNX $onnx_version (once, a few minutes)"
  quietly "$work/pip/bin/python" -m pip download -q --no-deps --no-binary onnx -d "$work" "onnx==$onnx_version"
  tar -xzf "$work/onnx-$onnx_version.tar.gz" -C "$work"
  find_new_cmake
  # A namespace of our own: a program may embed libonnxddp and another copy of ONNX.
  quietly "$new_cmake" -S "$work/onnx-$onnx_version" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$1" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DONNX_NAMESPACE=onnxddp_onnx -DONNX_ML=ON -DONNX_USE_PROTOBUF_SHARED_LIBS=ON -DONNX_GEN_PB_TYPE_STUBS=OFF \
    -DONNX_USE_UNITY_BUILD=ON -DPython3_EXECUTABLE=/usr/bin/python3
  quietly "$new_cmake" --build "$work/build" -j "$(nproc)"
  DESTDIR=$work/root quietly "$new_cmake" --install "$work/build"
  mv "$work/root$1" "$1"
}

# unpack_onednn FOLDER: headers, CMake configuration and library out of two Python packages.
unpack_onednn() {
  say "unpacking oneDNN $onednn_version"
  local part=$work/onednn wheel
  quietly "$work/pip/bin/python" -m pip download -q --no-deps -d "$part" \
    "onednn-cpu-gomp==$onednn_version" "onednn-devel-cpu-gomp==$onednn_version"
  for wheel in "$part"/*.whl; do quietly /usr/bin/python3 -m zipfile -e "$wheel" "$part"; done
  mkdir "$part/all"
  cp -r "$part"/*.data/data/. "$part/all"
  # Python archives hold no links: the library comes three times.
  (cd "$part/all/lib" && ln -sf libdnnl.so.3.2 libdnnl.so.3 && ln -sf libdnnl.so.3 libdnnl.so)
  mv "$part/all" "$1"
}

# make_python FOLDER: what checks our files from outside; used by tests and demo only.
make_python() {
  say "installing ${python_pins[*]} for the checks"
  quietly /usr/bin/python3 -m venv "$work/python"
  quietly "$work/python/bin/python" -m pip install -q --only-binary :all: "${python_pins[@]}"
  mv "$work/python" "$1"
}

# provide NAME VERSION COMMAND: makes $deps/NAME-VERSION by COMMAND unless it is there, and the link NAME to it.
provide() {
  local name=$1 folder=$1-$2
  if [ ! -d "$deps/$folder" ]; then
    if [ -z "${work:-}" ]; then
      mkdir -p "$deps"
      exec 9>"$deps/.lock"
      flock 9
      rm -rf "$deps"/.work.* # of a run that was killed
      work=$(mktemp -d "$deps/.work.XXXXXX")
      trap 'rm -rf "$work"' EXIT
      /usr/bin/python3 -m venv "$work/pip"
    fi
    # Another run may have made it while this one waited for the lock.
    [ -d "$deps/$folder" ] || "$3" "$deps/$folder"
  fi
  [ "$(readlink "$deps/$name" || true)" = "$folder" ] || ln -sfn "$folder" "$deps/$name"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install_packages
rm -rf "$work"
work=

installed_since libonnx-dev 1.17 || provide onnx "$onnx_version" build_onnx
installed_since libdnnl-dev 3 || provide onednn "$onednn_version" unpack_onednn
provide python "$(printf '%s' "${python_pins[*]}" | cksum | cut -d' ' -f1)" make_python

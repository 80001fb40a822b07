#!/usr/bin/env bash
# Checks the CUDA code on a machine with a GPU, nvcc 13 and g++, without network, in at most five minutes. One JSON line a check on
# standard output, details in the log folder; fails if a check fails.
#   scripts/gpu_check.sh             builds what it needs in build/gpu_check and runs on the device
#   scripts/gpu_check.sh --pack      on the build machine: puts GoogleTest into build/gpu_check/gtest, to be carried along
#   scripts/gpu_check.sh --dry-run [BUILD]   the same checks against the emulator, from a built tree (default build/release)
set -uo pipefail
cd "$(dirname "$0")/.."
mode=${1:-run}
work=build/gpu_check
[ "$mode" = --dry-run ] && work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir -p "$work/log"
failures=0
end=$((SECONDS + 285))

# check NAME SECONDS COMMAND...: one line, and what the command printed as JSON lines of its own before it.
check() {
  local name=$1 limit=$2 begin=$SECONDS rc=0
  shift 2
  [ $((end - SECONDS)) -lt "$limit" ] && limit=$((end - SECONDS))
  if [ "$limit" -le 0 ]; then rc=124; else timeout -k 5 "$limit" "$@" > "$work/log/$name" 2>&1 || rc=$?; fi
  grep -s '^{' "$work/log/$name"
  local skipped
  skipped=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\{0,1\}.*/\1/p' "$work/log/$name" | head -n 1)
  local ok=true
  [ $rc -ne 0 ] && ok=false && failures=$((failures + 1)) && tail -n 15 "$work/log/$name" >&2
  printf '{"check": "%s", "ok": %s, "rc": %d, "skipped": %d, "seconds": %d}\n' "$name" $ok $rc "${skipped:-0}" $((SECONDS - begin))
}

# --- from a built tree, on the emulator ---

if [ "$mode" = --dry-run ]; then
  tests=${2:-build/release}/tests
  check figures 60 "$tests/cuda_figures_emulated" "$work/description.json" --small
  check wrappers 60 "$tests/cuda_wrappers_test" --gtest_brief=1 '--gtest_filter=*/0:Status.*'
  check conformance 60 "$tests/cudaemu/cudaemu_test" --gtest_brief=1 '--gtest_filter=*Conformance.*/0:*Libraries.*/0'
  if [ -x "$tests/cudaemu/cudaemu_kernels_test" ]; then check kernels 120 "$tests/cudaemu/cudaemu_kernels_test" --gtest_brief=1 '--gtest_filter=*/0'; fi
  [ $failures -eq 0 ]
  exit
fi

if [ "$mode" = --pack ]; then
  mkdir -p "$work/gtest"
  cp -r /usr/include/gtest /usr/include/gmock "$work/gtest/"
  find /usr/lib -name 'libg*test*.a' -o -name 'libgmock.a' | xargs -I{} cp {} "$work/gtest/"
  du -sh "$work/gtest"
  exit
fi

# --- on a device ---

cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=$(command -v nvcc || echo "$cuda/bin/nvcc")
cuda=$(dirname "$(dirname "$nvcc")")
# cuDNN and NCCL come with the toolkit or with torch's packages.
site=$(python3 -c 'import nvidia, os; print(list(nvidia.__path__)[0])' 2> /dev/null || true)
includes=(-I. -isystem "$cuda/include")
libraries=(-L"$cuda/lib64")
path=$cuda/lib64
for part in cudnn nccl cublas cuda_runtime cu13; do
  [ -d "$site/$part/include" ] && includes+=(-isystem "$site/$part/include")
  if [ -d "$site/$part/lib" ]; then
    libraries+=(-L"$site/$part/lib")
    path=$path:$site/$part/lib
    # The packages have libX.so.N only; the linker wants libX.so.
    for so in "$site/$part/lib"/lib*.so.*; do ln -sf "$so" "$work/$(basename "${so%%.so.*}").so"; done
  fi
done
libraries+=(-L"$work")
if [ -d "$work/gtest/gtest" ]; then includes+=(-isystem "$work/gtest") && libraries+=(-L"$work/gtest"); fi
export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# Objects are made side by side; unused functions are dropped, so that the program's other parts are not needed.
build() {
  local flags=(-std=c++20 -O2 -g1 -fopenmp -ffunction-sections -ffp-contract=off -DCUDAEMU_REAL_DEVICE '-DONNXDDP_VERSION="check"')
  local sources=(graph/*.cpp graph/ops/*.cpp graph/passes/*.cpp executor/kernel.cpp executor/operands.cpp executor/cpu/*.cpp executor/plan/*.cpp
    executor/cuda/*.cpp executor/cuda/*.cu distributed/distribute.cpp
    tests/cudaemu/test_kernels.cu tests/cudaemu/conformance*_test.cpp tests/cudaemu/kernels_*_test.cpp
    tests/cuda/figures.cpp tests/cuda/device_test.cpp tests/cuda/blas_test.cpp tests/cuda/conv_test.cpp tests/cuda/table_test.cpp
    tests/cuda/step_test.cpp tests/cuda/without_dnnl.cpp tests/executor/kernel_case.cpp)
  local source object
  for source in "${sources[@]}"; do
    case $source in executor/cuda/loader.cpp | executor/cpu/dnnl.cpp) continue ;; esac
    [ -e "$source" ] || continue
    object=$work/$(echo "$source" | tr / _).o
    case $source in
      *.cu) printf '%s\0' "$nvcc -std=c++20 -O3 -arch=sm_90 -lineinfo -Xcompiler=-ffp-contract=off,-ffunction-sections ${includes[*]} -c $source -o $object" ;;
      *) printf '%s\0' "g++ ${flags[*]@Q} ${includes[*]} -c $source -o $object" ;;
    esac
  done | xargs -0 -P "$(nproc)" -I{} bash -c '{}' || return 1
  local common=("$work"/{graph,executor,distributed}_*.o "$work/tests_cuda_without_dnnl.cpp.o") real=(-lcudart -lcublas -lcublasLt -lcudnn -lnccl)
  link() { g++ -fopenmp -o "$work/$1" "${@:2}" "${common[@]}" -Wl,--gc-sections "${libraries[@]}" "${real[@]}" -lpthread -ldl; }
  link figures "$work/tests_cuda_figures.cpp.o" || return 1
  link wrappers "$work"/tests_cuda_*_test.cpp.o "$work/tests_executor_kernel_case.cpp.o" -lgtest_main -lgtest || return 1
  link conformance "$work"/tests_cudaemu_conformance*.o "$work/tests_cudaemu_test_kernels.cu.o" -lgmock -lgtest_main -lgtest || return 1
  if compgen -G "$work/tests_cudaemu_kernels_*.o" > /dev/null; then
    link kernels "$work"/tests_cudaemu_kernels_*.o -lgmock -lgtest_main -lgtest || return 1
  fi
}

rm -f "$work"/*.o
begin=$SECONDS
if build > "$work/log/build" 2>&1; then
  printf '{"check": "build", "ok": true, "seconds": %d}\n' $((SECONDS - begin))
else
  printf '{"check": "build", "ok": false, "seconds": %d}\n' $((SECONDS - begin))
  tail -n 30 "$work/log/build" >&2
  exit 1
fi

check figures 60 "$work/figures" "$work/description.json"
check wrappers 60 "$work/wrappers" --gtest_brief=1
check conformance 40 "$work/conformance" --gtest_brief=1
if [ -x "$work/kernels" ]; then check kernels 60 "$work/kernels" --gtest_brief=1; fi
sanitizer=$(command -v compute-sanitizer || echo "$cuda/bin/compute-sanitizer")
own=$work/kernels
[ -x "$own" ] || own=$work/conformance
for tool in memcheck racecheck; do
  check "$tool" 50 "$sanitizer" --tool $tool --error-exitcode 9 "$own" --gtest_brief=1
done
[ $failures -eq 0 ]

# Fails on an #include "…" that points the wrong way: graph uses nothing of ours, importer and distributed use graph only, executor all;
# inside executor, kernels and plan never include train or cli, and train never includes cli.
#   cmake -D SOURCE_DIR=… -P layering_test.cmake
cmake_minimum_required(VERSION 3.25)
set(graph_may "graph")
set(importer_may "graph|importer")
set(distributed_may "graph|distributed")
set(executor_may "graph|importer|distributed|executor")
set(bad "")

foreach(room graph importer distributed executor)
  file(GLOB_RECURSE files RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${room}/*.h" "${SOURCE_DIR}/${room}/*.cpp" "${SOURCE_DIR}/${room}/*.cu" "${SOURCE_DIR}/${room}/*.cuh")
  foreach(file ${files})
    file(STRINGS "${SOURCE_DIR}/${file}" includes REGEX "^[ \t]*#[ \t]*include[ \t]*\"")
    foreach(line ${includes})
      string(REGEX REPLACE "^[^\"]*\"([^\"]*)\".*$" "\\1" path "${line}")
      if(file STREQUAL "executor/cuda/launch.h" AND path STREQUAL "tests/cudaemu/device.h") # the one place that knows the emulator
        continue()
      elseif(NOT path MATCHES "^(${${room}_may})/")
        string(APPEND bad "\n  ${file} includes ${path}")
      elseif(file MATCHES "^executor/(cpu|cuda|plan)/" AND path MATCHES "^executor/(train|cli|report)/")
        string(APPEND bad "\n  ${file} includes ${path}")
      elseif(file MATCHES "^executor/(cpu|cuda)/" AND path MATCHES "^executor/plan/session")
        string(APPEND bad "\n  ${file} includes ${path}")
      elseif(file MATCHES "^executor/(train|report)/" AND path MATCHES "^executor/cli/")
        string(APPEND bad "\n  ${file} includes ${path}")
      endif()
    endforeach()
  endforeach()
endforeach()

# graph includes the standard library only: no third-party header has a name without an extension.
file(GLOB_RECURSE files RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/graph/*.h" "${SOURCE_DIR}/graph/*.cpp")
foreach(file ${files})
  file(STRINGS "${SOURCE_DIR}/${file}" includes REGEX "^[ \t]*#[ \t]*include[ \t]*<[^>]*[./]")
  foreach(line ${includes})
    string(APPEND bad "\n  ${file}: ${line}")
  endforeach()
endforeach()

if(bad)
  message(FATAL_ERROR "Includes against the layering of the folders:${bad}")
endif()

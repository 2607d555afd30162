#!/bin/sh
# Builds the engine's stress test under ThreadSanitizer and under AddressSanitizer with UndefinedBehaviorSanitizer,
# and runs both, at the same time. Usage: sanitize.sh [SECONDS, default 5] ; CXX names the compiler.
set -eu
seconds=${1:-5}
core=$(cd "$(dirname "$0")/.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
sources=$(find "$core" -maxdepth 1 -name '*.cc' ! -name 'bindings*.cc')

stress() {
    echo "== $1"
    # shellcheck disable=SC2086 # the sources are a list
    ${CXX:-g++} -std=c++17 -O1 -g -march=x86-64-v2 -pthread -fno-omit-frame-pointer -fno-sanitize-recover=all \
        "-fsanitize=$1" -I"$core" $sources "$core/tests/stress.cc" -o "$build/$1" &&
        TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1 second_deadlock_stack=1" \
            ASAN_OPTIONS="detect_leaks=1" timeout 600 "$build/$1" "$seconds"
}

stress thread >"$build/log" 2>&1 &
thread=$!
other=0
stress address,undefined || other=1
status=0
wait "$thread" || status=$?
cat "$build/log"
exit $((status || other))

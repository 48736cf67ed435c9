#!/bin/sh
# An interpreter that takes its time: becomes Python when the test says so.
while [ ! -e "$TEST_DIR/go" ]; do sleep 0.02; done
exec "$TEST_PYTHON" "$@"

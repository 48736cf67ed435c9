#!/bin/sh
# A rank that is no Python at all.
echo $$ > "$TEST_DIR/.up.$RANK"
mv "$TEST_DIR/.up.$RANK" "$TEST_DIR/up.r$RANK.g0"
exec sleep 300

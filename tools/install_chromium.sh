#!/bin/sh
# The browser for the tests: looked for, and installed where that can be done (Debian, as root).
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing chromium for the browser tests"
    if log=$(apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium 2>&1); then
        exit 0
    fi
    echo "$log" | tail -5 >&2
fi
echo "setup: no chromium: the browser tests will be skipped; on Debian and Ubuntu: apt-get install chromium"

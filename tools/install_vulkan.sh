#!/bin/sh
# A software GPU (llvmpipe) for the tests of the webgpu engine: looked for, and installed where that can be done (Debian, as root).
set -eu
for folder in /usr/share/vulkan/icd.d /etc/vulkan/icd.d; do
    for driver in "$folder"/*.json; do
        if [ -e "$driver" ]; then exit 0; fi
    done
done
if [ "$(uname)" != Linux ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing a software GPU for the webgpu tests"
    if log=$(apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1 2>&1); then
        exit 0
    fi
    echo "$log" | tail -5 >&2
fi
echo "setup: no Vulkan driver: the webgpu tests will be skipped; on Debian and Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1"

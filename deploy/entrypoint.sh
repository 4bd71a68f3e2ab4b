#!/bin/sh
# Verify the release, then become the server. The server never starts on a release that does not verify.
#
#   MEMOPT_RELEASE  the release's folder               (required)
#   MEMOPT_POLICY   trust.json, not from the release   (required)
#   MEMOPT_STAGE    a folder to be made, on tmpfs or a private volume: the server reads the verified copy in it
#   MEMOPT_JOBS     threads that verify                (default: memopt's)
#
# The arguments are the server's command; with MEMOPT_STAGE the word {} stands for the verified copy's path. This process
# becomes memopt and then the server, so signals reach the server, and the exit code is memopt's (3 signature, 4 content,
# 5 policy, 6 layout, 7 I/O: retry, 8 malformed, 9 unsupported) or the server's own.
set -eu

refuse() {
    echo "entrypoint.sh: $1" >&2
    exit 2
}

[ -n "${MEMOPT_RELEASE:-}" ] || refuse "MEMOPT_RELEASE is not set: name the release's folder"
[ -n "${MEMOPT_POLICY:-}" ] || refuse "MEMOPT_POLICY is not set: without a policy nothing is trusted"
[ "$#" -gt 0 ] || refuse "no command: give the server's command as arguments"

exec memopt exec "$MEMOPT_RELEASE" --policy "$MEMOPT_POLICY" \
    ${MEMOPT_STAGE:+--stage "$MEMOPT_STAGE"} ${MEMOPT_JOBS:+--jobs "$MEMOPT_JOBS"} -- "$@"

#!/usr/bin/env bash
# Gets the browser in which tests/reports/test_page.py opens the pages: Debian's chromium, with a font to write with.
# `make test` and .ci/run call it; where a chromium is there already it does nothing. Where it cannot install one
# (no apt-get, not root, no network) it says so in one line and those tests are skipped; with CI=true it fails.
set -uo pipefail

have_browser() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null; }

get_browser() {
    local quick=(-o Acquire::Retries=0 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=60)
    export DEBIAN_FRONTEND=noninteractive
    apt-get "${quick[@]}" update && apt-get "${quick[@]}" install -y --no-install-recommends "${packages[@]}"
}

packages=(chromium fonts-dejavu-core)
have_browser && exit 0

why=
if ! command -v apt-get >/dev/null; then
    why="there is no apt-get here"
elif [ "$(id -u)" != 0 ]; then
    why="installing it takes root"
else
    echo "installing ${packages[*]} for the tests of the pages"
    log=$(mktemp)
    get_browser >"$log" 2>&1 </dev/null || why="apt-get failed: $(tail -n 1 "$log")"
    case "${CI:-}" in 1 | true | yes) [ -z "$why" ] || tail -n 20 "$log" ;; esac
    rm -f "$log"
    if [ -z "$why" ] && ! have_browser; then why="the package brought no chromium"; fi
fi

[ -z "$why" ] && exit 0
echo "no chromium, and $why; tests/reports/test_page.py needs one: apt-get install ${packages[*]}" >&2
case "${CI:-}" in 1 | true | yes) exit 1 ;; esac
exit 0

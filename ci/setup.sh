# Sourced by the scripts beside it: makes .venv in the checkout, or brings it up to date.
# NVS_PYTHON names the interpreter to make it with (default: python3; 3.11 to 3.13).

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$checkout" || exit 7

set_up_venv() {
    local python="${NVS_PYTHON:-python3}" stamp=".venv/nvs-setup-stamp" wanted
    wanted="$(cat pyproject.toml ci/setup.sh | sha256sum | cut -d' ' -f1)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return 0
    fi
    # By what it prints: a program that takes any argument and ends well is no Python.
    case "$("$python" -c 'import sys; print("python", *sys.version_info[:2])' 2>/dev/null)" in
    "python 3 11" | "python 3 12" | "python 3 13") ;;
    *)
        echo "ci: $python is not Python 3.11 to 3.13; set NVS_PYTHON to one that is" >&2
        exit 7
        ;;
    esac
    if ! "$python" -m venv .venv; then
        echo "ci: could not make .venv; on Debian: apt-get install python3-venv" >&2
        exit 7
    fi
    echo "ci: installing the suite and its development tools into .venv"
    .venv/bin/python -m pip install -qq --upgrade 'pip>=25.1' &&
        .venv/bin/python -m pip install -qq --editable . --group dev ||
        { echo "ci: pip failed (above); is the package index reachable?" >&2; exit 7; }
    echo "$wanted" >"$stamp"
}

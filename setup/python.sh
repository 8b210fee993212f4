#!/bin/sh
# Print a Python that can set perfbook up: CPython 3.11 to 3.14 with venv. The one the environment was made with,
# else 3.11, then newer, anywhere on PATH; PYTHON=/path overrides. A launcher that fails (a pyenv shim without its
# version) and a Debian Python without its venv package are passed over.

right='import sys; sys.exit(not (sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 14)))'
whole="import ensurepip, venv; $right"

try() { "$1" -I -c "$2" >/dev/null 2>&1; }

if [ -n "$PYTHON" ]; then
    if try "$PYTHON" "$whole"; then
        printf '%s\n' "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON does not run, is not CPython 3.11 to 3.14, or lacks its venv module" >&2
    exit 1
fi

if try .venv/bin/python "$whole"; then
    echo .venv/bin/python
    exit 0
fi

IFS=:
bare=
for name in python3.11 python3.12 python3.13 python3.14 python3; do
    for folder in $PATH; do
        python=${folder:-.}/$name
        [ -x "$python" ] || continue
        if try "$python" "$whole"; then
            printf '%s\n' "$python"
            exit 0
        fi
        [ -z "$bare" ] && try "$python" "$right" && bare=$python
    done
done

if [ -n "$bare" ]; then
    echo "$bare has no venv module: install it (Debian, Ubuntu: apt install python3-venv), or set PYTHON=/path" >&2
else
    echo "no Python 3.11 to 3.14 on PATH: install one with its venv module, or set PYTHON=/path/to/python3" >&2
fi
exit 1

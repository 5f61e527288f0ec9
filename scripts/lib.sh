# shellcheck shell=bash
# Shared by the scripts here; source it. Makes the three Python environments, once, and says what it does.
#
#   ensure_env dev      linters and every test that needs no engine     -> $ENV_PYTHON
#   ensure_env engine   vLLM on CPU with its whole closure              -> $ENV_PYTHON
#   ensure_env sglang   SGLang on CPU                                   -> $ENV_PYTHON, TORCH_EXTENSIONS_DIR
#
# The packages live outside the clone, in a folder named after everything they were made from, so clones with
# equal lock files share them. A clone adds a thin environment of its own (.venv/NAME) that sees those
# packages and has this clone installed in editable mode: two clones never see each other's code.

SUITE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SUITE_CACHE="${MOONCAKE_SUITE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-kv-suite}"
SUITE_PYTHON_VERSION=3.11 # the lock files were resolved for it

say() { printf '\033[2m[%s]\033[0m %s\n' "$(basename "$0")" "$*" >&2; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# apt_install WHY PACKAGE... : installs as root, otherwise says what to install.
apt_install() {
    local why="$1"
    shift
    command -v apt-get >/dev/null || die "$why is missing, and there is no apt-get to install it with ($*)"
    [ "$(id -u)" = 0 ] || die "$why is missing; install it first:  sudo apt-get install -y $*"
    say "installing $* ($why is missing)"
    local log
    log="$(mktemp)"
    mkdir -p "$SUITE_CACHE"
    # One at a time: another script, or rdma-vm, may need apt at the same moment.
    if ! {
        flock 8 && apt-get update &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
    } >"$log" 2>&1 </dev/null 8>"$SUITE_CACHE/apt.lock"; then
        tail -n 20 "$log" >&2
        die "apt-get could not install $*; the whole log is $log"
    fi
    rm -f "$log"
}

# has_library NAME: whether the loader knows it. Not grep -q, which stops reading at the first line it finds: now and
# then ldconfig would then die of writing on, and with pipefail that is the answer.
has_library() {
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -F "$1" >/dev/null
}

# find_python: sets SUITE_PYTHON to an interpreter of the right version that can make environments.
find_python() {
    local wanted="$SUITE_PYTHON_VERSION" candidate
    for candidate in "${PYTHON:-}" "python$wanted" python3; do
        if [ -z "$candidate" ] || ! command -v "$candidate" >/dev/null; then continue; fi
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')"; then
            SUITE_PYTHON="$(command -v "$candidate")"
            "$SUITE_PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
                apt_install "Python's venv module" "python$wanted-venv"
            return
        fi
    done
    apt_install "Python $wanted (the lock files need exactly that; PYTHON=/path/to/it names another one)" \
        "python$wanted" "python$wanted-venv"
    SUITE_PYTHON="$(command -v "python$wanted")"
}

# env_key NAME: a digest of everything the packages of an environment are made from.
env_key() {
    {
        "$SUITE_PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$SUITE_ROOT/requirements/$1.lock"
        case "$1" in
            engine) cat "$SUITE_ROOT"/requirements/stubs/*/pyproject.toml ;;
            sglang) cat "$SUITE_ROOT"/requirements/stubs-sglang/sglang_on_cpu/{pyproject.toml,sglang_on_cpu/*.py} ;;
        esac
    } | sha256sum | cut -c1-16
}

# pip_install LOG TOTAL ARGUMENTS... : runs pip, showing one line of progress instead of hundreds.
pip_install() {
    local log="$1" total="$2"
    shift 2
    "$BUILD_DIR/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" \
        2>&1 </dev/null | tee -a "$log" |
        awk -v total="$total" -v tty="$([ -t 2 ] && echo 1)" '
            /^Collecting|^Processing/ { n++; step = "fetching " n "/" total ": " $2 }
            /^Installing collected/   { step = "unpacking " total " packages" }
            /^Collecting|^Processing|^Installing collected/ {
                if (tty) printf "\r\033[K  %s", step > "/dev/stderr"
                else if (n % 25 == 1 || /^Installing/) print "  " step > "/dev/stderr"
                fflush("/dev/stderr")
            }
            END { if (tty) printf "\r\033[K" > "/dev/stderr" }'
}

explain_pip_failure() {
    grep -E '^ERROR' "$1" | tail -n 5 >&2 || true
    if grep -qE 'No matching distribution found for torch|satisfies the requirement torch' "$1"; then
        die "pip found no CPU build of torch ($(grep '^torch==' "$SUITE_ROOT/requirements/engine.lock"));
  set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU wheels (see pytorch.org, 'Get started', CPU) and repeat"
    fi
    die "pip failed; the whole log is $1"
}

# build_packages NAME DIR: the shared packages of one environment. DIR/complete is written last: whatever an
# interrupted install left behind has no such file, and is thrown away. (A rename would break its scripts.)
build_packages() {
    local name="$1" dir="$2" lock="$SUITE_ROOT/requirements/$1.lock" log="$2.log" total
    total="$(grep -c '^[A-Za-z]' "$lock")"
    say "making the $name environment: $total packages, once ($dir)"
    : >"$log"
    rm -rf "$dir"
    "$SUITE_PYTHON" -m venv "$dir"
    BUILD_DIR="$dir"
    pip_install "$log" "$total" --no-deps -r "$lock" || explain_pip_failure "$log"
    if [ "$name" = engine ]; then
        pip_install "$log" 2 --no-deps --no-build-isolation "$SUITE_ROOT"/requirements/stubs/*/ ||
            explain_pip_failure "$log"
    fi
    if [ "$name" = sglang ]; then finish_sglang "$dir" "$log"; fi
    touch "$dir/complete"
}

# finish_sglang DIR LOG: what SGLang needs besides packages. The page hash is C++ that SGLang compiles when it first
# needs it, which would be in the middle of somebody's request.
finish_sglang() {
    local dir="$1" log="$2"
    # From a copy: setuptools leaves its build folder beside what it builds.
    cp -r "$SUITE_ROOT/requirements/stubs-sglang" "$dir/stubs"
    pip_install "$log" 1 --no-deps --no-build-isolation "$dir/stubs/sglang_on_cpu" || explain_pip_failure "$log"
    echo 'import sglang_on_cpu.start' >"$dir/lib/python$SUITE_PYTHON_VERSION/site-packages/sglang_on_cpu.pth"
    say "compiling SGLang's page hash, once"
    TORCH_EXTENSIONS_DIR="$dir/torch_extensions" "$dir/bin/python" -c \
        'from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1] * 16, page_size=16)' >>"$log" 2>&1 </dev/null ||
        die "SGLang's page hash does not compile; the whole log is $log"
}

# compiler_for_sglang: what finish_sglang compiles with.
compiler_for_sglang() {
    local include missing=()
    include="$("$SUITE_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    command -v g++ >/dev/null || missing+=(g++)
    command -v ninja >/dev/null || missing+=(ninja-build)
    [ -e "$include/Python.h" ] || missing+=("python$SUITE_PYTHON_VERSION-dev")
    # Compiled to nothing: does the compiler find the header, wherever it lies?
    if [ ${#missing[@]} -gt 0 ] || ! echo '#include <openssl/sha.h>' | g++ -x c++ -fsyntax-only - 2>/dev/null; then
        apt_install "what SGLang compiles its page hash with" "${missing[@]}" libssl-dev
    fi
}

# add_clone PACKAGES_DIR LAYER_DIR: the thin environment of this clone.
add_clone() {
    local packages="$1" layer="$2" site script
    rm -rf "$layer"
    "$packages/bin/python3" -m venv --without-pip "$layer"
    site="$("$layer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # addsitedir, not a bare path: .pth files among the packages must be honoured too.
    printf 'import site; site.addsitedir(%s)\n' "'$packages/lib/python$SUITE_PYTHON_VERSION/site-packages'" \
        >"$site/_shared_packages.pth"
    "$layer/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
        --editable "$SUITE_ROOT" </dev/null
    # The shared environment's commands start an interpreter that does not see this clone; ours must.
    for script in "$packages"/bin/*; do
        if [ ! -f "$script" ] || [ -e "$layer/bin/${script##*/}" ]; then continue; fi
        if [ "$(head -c 2 "$script" | tr -d '\0')" = '#!' ]; then
            sed "s|$packages/bin/python|$layer/bin/python|" "$script" >"$layer/bin/${script##*/}"
            chmod 755 "$layer/bin/${script##*/}"
        else
            ln -s "$script" "$layer/bin/${script##*/}"
        fi
    done
}

# ensure_env NAME: makes what is missing; sets ENV_DIR and ENV_PYTHON.
ensure_env() {
    local name="$1" packages stamp
    find_python
    if [ "$name" = engine ] && ! has_library libnuma.so.1; then
        apt_install "libnuma (vLLM's CPU kernels link to it)" libnuma1
    fi
    if [ "$name" = sglang ]; then compiler_for_sglang; fi
    mkdir -p "$SUITE_CACHE" "$SUITE_ROOT/.venv"
    packages="$SUITE_CACHE/$name-$(env_key "$name")"
    if [ ! -e "$packages/complete" ]; then
        (
            flock 9
            [ -e "$packages/complete" ] || build_packages "$name" "$packages"
        ) 9>"$packages.lock" || exit 1
    fi
    if [ "$name" = sglang ]; then export TORCH_EXTENSIONS_DIR="$packages/torch_extensions"; fi
    ENV_DIR="$SUITE_ROOT/.venv/$name"
    ENV_PYTHON="$ENV_DIR/bin/python"
    stamp="$packages $SUITE_ROOT $(sha256sum <"$SUITE_ROOT/pyproject.toml")"
    (
        flock 9
        if [ "$(cat "$ENV_DIR/suite.stamp" 2>/dev/null)" != "$stamp" ]; then
            say "installing this clone into .venv/$name"
            add_clone "$packages" "$ENV_DIR"
            printf '%s\n' "$stamp" >"$ENV_DIR/suite.stamp"
        fi
    ) 9>"$SUITE_ROOT/.venv/lock" || exit 1
}

# ensure_chromium: the browser in which tests look at the router's dashboard.
ensure_chromium() {
    local name
    for name in chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null; then return; fi
    done
    apt_install "Chromium (tests look at the dashboard with it)" chromium
}

# ensure_model NAME: sets MODEL_DIR to the exported model (see make_model.py); needs the engine environment.
ensure_model() {
    MODEL_DIR="$SUITE_CACHE/models/$1"
    "$ENV_PYTHON" "$SUITE_ROOT/scripts/make_model.py" "$1" "$MODEL_DIR" >/dev/null
}

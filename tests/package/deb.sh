#!/usr/bin/env bash
# Checks the Debian package as a stranger meets it: installs it in a bare Debian 12, captions a bundled image as a user who is
# not root, removes it, and compares the files with those from before. For maintainers; ctest does not run it.
#
#   tests/package/deb.sh build/release-programs/kvlm_*.deb             in a Debian 12 that debootstrap makes
#   tests/package/deb.sh kvlm_*.deb --base FOLDER                      in a copy of FOLDER, which holds a bare Debian
#   tests/package/deb.sh kvlm_*.deb --keep FOLDER                      leaves that Debian in FOLDER, with the package removed
#
# Needs root, debootstrap (or --base) and Debian's packages. MIRROR names another mirror than deb.debian.org.
# Exit status 0 if everything is as expected, 1 if not, 2 for a wrong argument or where root or debootstrap is missing.
set -euo pipefail

usage() {
  echo "deb.sh: $1" >&2
  exit 2
}

fail() {
  echo "deb.sh: failed: $1" >&2
  exit 1
}

package='' base='' keep=''
while (($#)); do
  case $1 in
    --base | --keep)
      (($# > 1)) || usage "$1 needs a folder"
      declare "${1#--}=$2"
      shift
      ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) package=$1 ;;
  esac
  shift
done
[[ -f $package ]] || usage "give the package, for example build/release-programs/kvlm_0.2.0_amd64.deb"
[[ $(id -u) == 0 ]] || usage "run it as root: it makes a chroot"
[[ $base ]] || command -v debootstrap >/dev/null || usage "debootstrap is not installed; install it, or give --base FOLDER"
[[ ! $keep || ! -e $keep ]] || usage "$keep exists; give --keep a folder that does not"

folder=$(mktemp -d)
root=$folder/debian
mounted=
clean_up() {
  if [[ $mounted ]]; then umount --lazy "$root/proc" "$root/dev"; fi
  if [[ $keep && -d $root ]]; then mv "$root" "$keep"; fi
  rm -rf --one-file-system "$folder"
}
trap clean_up EXIT

echo "== a bare Debian"
if [[ $base ]]; then
  cp -a "$base" "$root"
else
  debootstrap --variant=minbase bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$folder/log" ||
    fail "debootstrap: $(tail -n 3 "$folder/log")"
fi
cp /etc/resolv.conf "$root/etc/"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mounted=1

as_root() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "$@"; }
as_user() { chroot --userspec=visitor:visitor "$root" env -i PATH=/usr/bin:/bin HOME=/home/visitor LC_ALL=C.UTF-8 "$@"; }

# Every path but those of package managers' own records.
files() {
  as_root find / -xdev \( -path /proc -o -path /dev -o -path /var/cache -o -path /var/log -o -path /var/lib/apt \
    -o -path /var/lib/dpkg -o -path /tmp \) -prune -o -print | sort
}

# expect WHAT WANTED COMMAND...: the command's output holds WANTED.
expect() {
  local what=$1 wanted=$2 out
  shift 2
  out=$("$@" 2>&1) || fail "$what: $out"
  [[ $out == *"$wanted"* ]] || fail "$what: expected '$wanted' in: $out"
  echo "$what: ${out%%$'\n'*}"
}

as_root useradd --create-home visitor
as_root apt-get -q update >"$folder/log" 2>&1 || fail "apt-get update: $(tail -n 3 "$folder/log")"
files >"$folder/before"

echo "== install"
cp "$package" "$root/tmp/kvlm.deb"
as_root apt-get -q install -y --no-install-recommends /tmp/kvlm.deb >"$folder/log" 2>&1 ||
  fail "apt-get install: $(tail -n 20 "$folder/log")"
as_root dpkg -L kvlm | sort >"$folder/listed"
# shellcheck disable=SC2016 # dpkg expands it, not the shell
as_root dpkg-query -W -f='depends: ${Depends}\ninstalled: ${Installed-Size} KiB\n' kvlm
grep -E "additional disk space|newly installed" "$folder/log" || true

echo "== use, as a user who is not root"
scenes=/usr/share/kvlm/pocket/heldout/scenes
# shellcheck disable=SC2016
version=$(as_root dpkg-query -W -f='${Version}' kvlm)
expect "version" "kvlm $version (commit " as_user vlm-run --version
expect "caption" "There are seven objects" as_user vlm-run -q --image $scenes/scene_000.png
expect "batch" "" as_user vlm-run -q --batch "$scenes/scene_00[01].png" --out /home/visitor/out.jsonl
expect "answers" "2" as_user grep -c '"text"' /home/visitor/out.jsonl
expect "policies" "kivi" as_user vlm-kv list
expect "memory" "stored bits" as_user vlm-kv explain kivi,bits=2 -m pocket --tokens 624 --visual 576
expect "speed" "decode" as_user vlm-bench latency -m pocket --repeats 1 --tokens 2 --prompt-tokens 40
rm "$root/home/visitor/out.jsonl"
grep -q "^/usr/share/man/man1/vlm-run.1" "$folder/listed" || fail "the package has no man page; install help2man"
grep -q "^/usr/share/bash-completion/completions/vlm-kv" "$folder/listed" || fail "the package has no completion"
if grep -vE '^/(usr|\.)?(/|$)' "$folder/listed"; then fail "these files are not below /usr"; fi

echo "== remove"
as_root dpkg --remove kvlm >"$folder/log" 2>&1 || fail "dpkg --remove: $(cat "$folder/log")"
if as_root dpkg-query -W kvlm >/dev/null 2>&1; then
  as_root dpkg --purge kvlm >"$folder/log" 2>&1 || fail "dpkg --purge: $(cat "$folder/log")"
fi
left=$(as_root find / -xdev \( -path /proc -o -path /dev -o -path /tmp \) -prune -o \( -name '*kvlm*' -o -name 'vlm-*' \) -print)
[[ -z $left ]] || fail "removing leaves $left"
as_root apt-get -q autoremove -y --purge >"$folder/log" 2>&1 || fail "apt-get autoremove: $(tail -n 3 "$folder/log")"
files >"$folder/after"
diff "$folder/before" "$folder/after" || fail "these files differ before and after"
echo "== passed: nothing is left of $(wc -l <"$folder/listed") paths"

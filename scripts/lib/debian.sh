# shellcheck shell=sh
# What the scripts share that run programs of Debian's packages without installing them. They define `say`.

# Downloads the first package of a list of alternatives into the current folder.
download() {
    for package in $(printf '%s' "$1" | tr '|' ' '); do
        # shellcheck disable=SC2086
        apt-get $options --quiet --quiet download "$package" >/dev/null 2>&1 && return
    done
    return 1
}

# Downloads package $1 and the libraries $2 into the current folder, and unpacks them below `tree`, in which a script $1
# starts the program $3.
unpack_packages() {
    options=
    if ! download "$1"; then
        # A new container has no package lists, and only root may fetch them for the system. These lists go to the current
        # folder.
        mkdir -p lists/partial
        options="-o Dir::State::lists=$PWD/lists -o Dir::Cache=$PWD -o APT::Sandbox::User="
        # shellcheck disable=SC2086
        apt-get $options --quiet --quiet update >&2 && download "$1" || return 1
    fi
    for package in $2; do
        download "$package" || say "$package is not available; continuing without it"
    done
    mkdir tree
    for file in *.deb; do
        [ -f "$file" ] || return 1
        dpkg -x "$file" tree || return 1
    done
    # The folder may be renamed or copied, so a script in it starts the program with the path of the libraries.
    {
        cat <<'WRAPPER'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
for folder in "$here"/lib/*-linux-gnu* "$here"/usr/lib/*-linux-gnu*; do
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH
WRAPPER
        # shellcheck disable=SC2016
        printf 'exec "$here/%s" "$@"\n' "$3"
    } >"tree/$1"
    chmod -R a+rX tree
    chmod 755 "tree/$1"
}

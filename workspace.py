"""What of an agent's workspace reaches the verifier, and what of its history the agent sees. Imports nothing of ours.

Defences, by the names that --off takes away:
git    .git is the image's, not the agent's: its history, without hooks and settings that run commands; of a repository
       that the agent made, hooks and settings are left out
tools  what the image holds of PATH and LD_LIBRARY_PATH folders, virtual environments and node_modules stays, and
       nothing else comes there; files that Python, pytest, uv, shells or curl would load unasked (AUTOLOADED, AT_HOME,
       a user's site-packages; at the top and in PYTHONPATH's folders new modules of the names of others that the
       image's python3 knows) are left out
links  ValueError for setuid files, devices, fifos and symbolic links out of the workspace, but for the image's and
       those into SHARED
Not covered: settings of pytest and uv in the workspace's tox.ini, setup.cfg and pyproject.toml, which rule tests that
are run inside it; a PATH or LD_LIBRARY_PATH in which the workspace itself stands; whatever else tests load from it.
"""
import copy, posixpath, re, sys

# sh -c CLEAR FOLDER DEEP WORDS...: empties FOLDER but for what find's WORDS match and, where DEEP is not empty, PATH's
# folders and virtual environments in it. Prints, each ended by NUL, the paths that stay (PATH's, even where there are
# none yet), "M<name>" of modules that python3 knows from elsewhere, "P<folder/>" of where it looks for others ("" is
# the top), "T<path>" of files there that can be modules, "L<path>\n<target>" of links that do not stay, and
# "S<bytes> <number>" of what the folder held. Makes /logs/verifier, for any user.
CLEAR = r"""mkdir -p /logs/verifier; chmod 777 /logs/verifier
cd "$0" 2> /dev/null || exit 0
is_deep=$1; shift
printf 'S%s\0' "$(find . -printf '%s\n' 2> /dev/null | awk '{ n += $1 + 1024 } END { printf "%.0f %d", n, NR }')"
full() { full=${1%/}; full=${full#./}; case $full in /*) ;; . | '') full=$0 ;; *) full=$0/$full ;; esac; }
[ -z "$is_deep" ] || {
    IFS=:; for top in "$0" $PYTHONPATH; do full "$top"; top=$full/
        case $top in "$0"/*) top=${top#"$0/"}; printf 'P%s\0' "$top"
            find "./$top" -mindepth 1 -maxdepth 2 ! -type d \( -name '__init__.*' -o ! -path "./$top*/*" \
                \( -name '*.py' -o -name '*.pyc' -o -name '*.so' \) \) -printf "T$top%P\\0" 2> /dev/null | head -c 8000
            printf '\0' ;; esac        # a word that head has cut is not to swallow the next
    done
    (cd / && python3 -c '
import pkgutil, sys
place = lambda f: str(getattr(f, "path", "") or getattr(f, "archive", ""))
known = {m.name for m in pkgutil.iter_modules() if not (place(m.module_finder) + "/").startswith(sys.argv[1] + "/")}
print("".join("M%s\0" % name for name in sorted(known - set(getattr(sys, "stdlib_module_names", ())))), end="")
' "$0" 2> /dev/null | head -c 16000; printf '\0')
    IFS='
'; for file in $(find . -mindepth 2 -name pyvenv.cfg); do set -- "$@" -o -path "${file%/*}"; done
    IFS=:; for folder in $PATH $LD_LIBRARY_PATH $(echo "$LD_PRELOAD" | tr ' ' :) $BASH_ENV; do full "$folder"
        case $full in "$0"/?*) printf '.%s\0' "${full#"$0"}"; set -- "$@" -o -path ".${full#"$0"}" ;; esac
    done
}
find . -mindepth 1 \( "$@" \) -prune -o -type l -printf 'L%P\n%l\0' 2> /dev/null
find . -mindepth 1 \( "$@" \) -prune -print0 -o ! -type d -exec rm -f {} + || exit 1
find . -mindepth 1 \( "$@" \) -prune -o -type d -print0 | sort -rz | xargs -0 rmdir 2> /dev/null
exit 0"""
AUTOLOADED = {"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "entry_points.txt",
              "uv.toml"}
AT_HOME = (".bashrc", ".bash_profile", ".bash_login", ".profile", ".zshenv", ".curlrc", ".wgetrc", ".pydistutils.cfg",
           ".pip", ".config/pip", ".config/uv", ".config/curlrc")       # where the workspace is a user's home
MODULES = {*sys.stdlib_module_names, "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments",
           "sitecustomize", "usercustomize"}
SHARED = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")   # of the image: a link there reveals nothing


# Of all repositories below a folder ($0): one commit of what HEAD holds, the index and the files as they are. One in an
# image without git is taken away: its objects could be read all the same. Prints a line for each.
SQUASH = r"""cd "$0" 2> /dev/null || exit 0
export HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_COUNT=3 GIT_CONFIG_KEY_0=safe.directory
export GIT_CONFIG_VALUE_0='*' GIT_CONFIG_KEY_1=core.fsmonitor GIT_CONFIG_VALUE_1=false
export GIT_CONFIG_KEY_2=core.hooksPath GIT_CONFIG_VALUE_2=/dev/null
for who in AUTHOR COMMITTER; do
    export GIT_${who}_NAME=task GIT_${who}_EMAIL=task@localhost GIT_${who}_DATE='2000-01-01T00:00:00Z'
done
IFS='
'; for git in $(find . -xdev -name .git -prune); do (
    echo "$git"
    cd "${git%/*}" && [ -d .git ] && git rev-parse --git-dir > /dev/null 2>&1 || { rm -rf "${git##*/}"; exit; }
    head=$(git symbolic-ref -q HEAD || echo refs/heads/main)
    commit=$(git commit-tree -m start 'HEAD^{tree}')
    for key in $(git config --local --name-only --list |
                 grep -E '^(remote|branch|credential|http|url|include|submodule)'); do
        git config --local --unset-all "$key"
    done
    (cd .git && rm -rf refs/* packed-refs logs *_HEAD modules worktrees shallow rebase-* sequencer lfs svn info/grafts \
        objects/pack/*.keep objects/pack/*.promisor && mkdir -p refs/heads)
    git symbolic-ref HEAD "$head" && { [ -z "$commit" ] || git update-ref "$head" "$commit"; }
    git repack -adq && rm -rf .git/objects/info/alternates .git/objects/info/commit-graph* && git prune --expire=now
    pruned=$?; chown -hR --reference=. .git; exit $pruned
) < /dev/null 2> /dev/null || exit 1; done"""


def kept_by(off):
    """Words for CLEAR: what of the image's stays under the defences that are on."""
    names = (() if "git" in off else (".git",)) + (() if "tools" in off else ("node_modules", *AUTOLOADED))
    at_home = () if "tools" in off else AT_HOME
    return ["-name", "", *(word for name in names for word in ("-o", "-name", name)),
            *(word for name in at_home for word in ("-o", "-path", f"./{name}"))]


def heard(text):
    """What CLEAR printed -> names that stay, {name of a link: where it leads}, what `is_loaded` knows of the image's
    Python, bytes and number of files that the folder held."""
    found = text.split("\0")
    told = lambda mark: [x.removeprefix(mark) for x in found if x.startswith(mark)]
    sizes = [int(x) for word in told("S") for x in word.split()] or [0, 0]
    python = (told("P") or [""], MODULES.union(told("M")), set(told("T")))
    return set(told("./")), dict(x.split("\n", 1) for x in told("L")), python, sizes


def is_loaded(name, parts, is_link, python):
    """Would Python, pytest, uv, a shell or curl load a file of this name, or what a link of it leads to, unasked?
    is_link: one that is not the image's; python: folders/ where it looks for modules, names of those that it knows,
    the image's own files there."""
    if AUTOLOADED.intersection(parts) or parts[:2] == [".local", "lib"]: return True
    if not {parts[0], "/".join(parts[:2])}.isdisjoint(AT_HOME): return True
    if name.endswith(".pth") and "site-packages" in parts: return True
    tops, known, own = python
    if is_link and any(top.startswith(f"{name}/") for top in tops): return True
    for top in tops if name not in own else ():
        inner = name.removeprefix(top).split("/")
        if not name.startswith(top) or inner[0].partition(".")[0] not in known: continue
        if len(inner) == 2 and inner[1].startswith("__init__."): return True
        if len(inner) == 1 and (is_link or name.endswith((".py", ".pyc", ".so"))): return True
    return False


def is_git_setting(name, parts, is_folder, bare):
    """A file by which a repository that is not the image's could run commands? bare: folders that git would take for
    one, whatever their names."""
    if name in (".gitconfig", ".config/git/config") or parts[-1] == "config.worktree": return True
    if parts[-1] in (".git", "commondir"): return not is_folder     # leads to a repository elsewhere
    is_repository = lambda i: "/".join(parts[:i]) in bare or i > 0 and parts[i - 1].endswith(".git")
    return (parts[-1] == "config" and (".git/" in name or is_repository(len(parts) - 1))
            or any(part == "hooks" and is_repository(i) for i, part in enumerate(parts)))


def choose(members, inside, kept, links, off, python=((), (), ())):
    """members: of an archive of the folder `inside`, as the agent left it; kept, links, python: what `heard` tells ->
    (those that are carried over, names left out). ValueError: one may not be."""
    chosen, left_out, depth = [], [], max((name.count("/") + 1 for name in kept), default=0)
    above = {"/".join(name.split("/")[:i]) for name in kept for i in range(1, name.count("/") + 1)}
    members = {member.name: member for member in members}
    bare = {folder.partition("/")[2] for folder in map(posixpath.dirname, members)
            if f"{folder}/HEAD" in members and f"{folder}/objects" in members}
    carried = {}                                        # file of the archive -> name under which its content comes over
    for member in members.values():
        name = member.name.partition("/")[2] or "."     # within the folder, which the archive names first
        parts, origin = name.split("/"), member.linkname if member.islnk() else member.name
        if member.islnk() and origin not in carried:    # a second name of what is left out, or of a link: judged anew
            member = renamed(members[origin], "name", member.name)
        if not kept.isdisjoint("/".join(parts[:i + 1]) for i in range(min(len(parts), depth))): continue
        if "tools" not in off and "__pycache__" in parts: continue      # may hold another program than its source
        if name in above and not member.isdir():
            raise ValueError(f"{name} is not carried over: the image has a folder there, some of which stays")
        is_image_s = member.issym() and links.get(name) == member.linkname
        if ("tools" not in off and is_loaded(name, parts, member.issym() and not is_image_s, python)
                or "git" not in off and is_git_setting(name, parts, member.isdir(), bare)):
            left_out.append(name)
            continue
        if "links" not in off and not is_image_s and (problem := refused(member, inside)):
            raise ValueError(f"{name} is not carried over: {problem}")
        if member.islnk(): member = renamed(member, "linkname", carried[origin])
        elif member.isreg(): carried[origin] = member.name
        chosen.append(member)
    return chosen, left_out


def renamed(member, key, name):
    member = copy.copy(member)
    member.pax_headers = {}                             # they would tell the old name
    setattr(member, key, name)
    return member


def refused(member, inside):
    """What is wrong with a member of a workspace's archive, None = nothing."""
    if member.isdir() or member.islnk(): return None
    if member.isreg(): return "it is setuid or setgid" if member.mode & 0o6000 else None
    if not member.issym(): return "it is a device or fifo"
    up = re.sub(r"^(\.\./?|\./)*", "", member.linkname)   # `..` further on may leave by another link
    folder = posixpath.join(posixpath.dirname(inside), posixpath.dirname(member.name))
    target = posixpath.normpath(posixpath.join(folder, member.linkname))
    if ".." in up.split("/") or not f"{target}/".startswith(tuple(f"{folder}/" for folder in (inside, *SHARED))):
        return f"it is a link out of the workspace, to {member.linkname}"

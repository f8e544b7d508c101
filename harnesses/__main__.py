"""The commands of `python -m harnesses`; see the docstring of the package."""
import sys
import time

from harnesses import PATHS, names, runtime

if sys.argv[1:] == ["list"]:
    print("\n".join(names()))
elif sys.argv[1:] == ["build"]:
    for need in PATHS:
        started = time.monotonic()
        folder = runtime(need)
        size_mb = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6
        print(f"{need} {folder} {size_mb:.0f} MB {time.monotonic() - started:.1f} s")
else:
    sys.exit("usage: python -m harnesses list | build")

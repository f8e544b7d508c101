"""The commands of `python -m harnesses`; see the docstring of the package."""
import argparse, re, time

import rollout, sandbox
from harnesses import PACKAGES, load, names, runtime


def main(args):
    chosen = {name: load(name) for name in args.name or names()}
    if args.what == "list":
        for name, harness in chosen.items(): print(name, harness.package)
    if args.what == "build":
        for need in dict.fromkeys(x for h in chosen.values() for x in (*h.needs, h.package) if x):
            started = time.monotonic()
            folder, took_s = runtime(need), time.monotonic() - started
            size_mb = sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6
            print(f"{PACKAGES.get(need, need)} {folder} {size_mb:.0f} MB {took_s:.1f} s", flush=True)
    return args.what == "check" and not all([check(*item) for item in chosen.items()])


def check(name: str, harness) -> bool:
    if not harness.version:
        print(f"{name} is ours, there is nothing to check")
        return True
    wanted = re.search(r"(==|@)(\d[\d.]*)", harness.package)[2]
    kind = sandbox.SANDBOXES[sandbox.choose("bubblewrap")]              # Docker would need an image
    with kind(sandbox.Environment("host"), run_id="check", name=name, runtimes=harness.mounts()) as box:
        result = box.exec(harness.version, timeout_s=120)
    is_right = result.exit_code == 0 and wanted in result.output
    print(f"{name} {wanted} {'ok' if is_right else f'FAILED: {result}'}", flush=True)
    return is_right


parser = argparse.ArgumentParser(prog="python -m harnesses", allow_abbrev=False)
parser.add_argument("what", choices=("list", "build", "check"))
parser.add_argument("name", nargs="*", help="harnesses; none = all")
if __name__ == "__main__":
    rollout.command(main, parser.parse_args())

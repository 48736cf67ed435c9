"""Writes what a script can see of how it was started, as JSON, into TEST_DIR; without goodrun's own variables."""

import json
import os
import sys
from pathlib import Path

seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "name": __name__,
    "main": sys.modules["__main__"].__file__,
    "path": sys.path,
    "cwd": os.getcwd(),
    "unbuffered": sys.stdout.write_through,
    "leader": os.getsid(0) == os.getpid(),
    "hook": "sitecustomize" in sys.modules,
    "environment": {k: v for k, v in sorted(os.environ.items()) if not k.startswith("GOODRUN_")},
    "children": os.popen(f"{sys.executable} -c 'import sys, os; print(sys.path, os.environ.get(\"PYTHONPATH\"))'").read(),
}
Path(os.environ["TEST_DIR"], f"seen.r{os.environ['RANK']}").write_text(json.dumps(seen))

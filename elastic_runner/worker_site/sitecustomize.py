"""Run by the interpreter of every worker before the script: brings in goodrun's instruments, then gets out of the way.

The supervisor puts this folder first on PYTHONPATH. So a worker stays exactly `python -u train.py …` (argv, __main__, sys.path, `ps`), and
this file takes itself off PYTHONPATH and sys.path again and runs the sitecustomize it stands in front of, if there is one. Children of
the worker inherit nothing.
"""

import os
import sys


def _step_aside() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    before = os.environ.pop("GOODRUN_PYTHONPATH", None)
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before.removeprefix("=")
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401  (the one that was hidden behind this)
    except ImportError as e:
        if e.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)  # the import of this very file looks for it


def _instrument() -> None:
    # a grandchild (a script run by a --no-python command) is not a rank and has no page
    parent = os.environ.pop("GOODRUN_PARENT", "")
    if parent != str(os.getppid()):
        if parent and not os.path.exists(f"/proc/{parent}"):
            os._exit(1)  # the supervisor died before this process could be tied to it
        return
    root = os.environ.pop("GOODRUN_ROOT")
    import importlib.util

    spec = importlib.util.spec_from_file_location("goodrun", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
    if spec is None or spec.loader is None:
        return
    known = sys.modules.get("goodrun")
    if known is None:
        sys.modules["goodrun"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    from goodrun.elastic_runner import bootstrap, standby, tied

    tied.die_with_parent(int(parent))
    bootstrap.hook_imports()
    if standby.VARIABLE in os.environ:
        standby.serve(int(parent))
    bootstrap.instrument()


_step_aside()
_instrument()

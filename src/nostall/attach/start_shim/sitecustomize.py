"""Start-up module under ``nostall record`` and ``optimize``: imported before the program.

Its folder is first on PYTHONPATH of the whole process tree.  A ``sitecustomize`` of the user's own
is imported after it, and a Python that cannot import nostall runs the program unobserved.
"""

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow to import)

try:
    if "NOSTALL_RECORD_FILE" in os.environ:
        importlib.import_module("nostall.attach.launch_recorder").install()
    if "NOSTALL_PROGRAM" in os.environ:
        importlib.import_module("nostall.attach.program.start").install()
except Exception as error:  # any error of nostall's import: the program must run
    print(f"nostall: not usable in {sys.executable} ({error}); it runs unobserved", file=sys.stderr)

_path = list(sys.path)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
del sys.modules["sitecustomize"]
try:
    importlib.import_module("sitecustomize")
except ImportError:
    sys.modules["sitecustomize"] = importlib.import_module("types").ModuleType("sitecustomize")
finally:
    sys.path[:] = _path
